"""Scores of a user's table: every row of training runs or collective curves is predicted, or counted with a reason."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from precision_time.predictor.answering.answers import answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.closed_form.fit_links import evaluate_collectives
from precision_time.predictor.rows.observations import Observation, observe_table
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.rows.quarantine import REASONS
from precision_time.predictor.scoring.metrics import bootstrap_mape, score
from precision_time.storage.errors import InputError, PrecisionTimeError
from precision_time.storage.tables import read_table

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["PredictedTable", "evaluate_curves", "predict_table"]

Floats = npt.NDArray[np.float64]
Result = TypeVar("Result")

#: Columns added to those of the table; a column of the file with the same name replaces them.
_DERIVED: dict[str, Callable[[Observation], str]] = {
    "family": lambda observation: observation.setup.workload.family,
    "kind": lambda observation: observation.setup.workload.kind,
    "network": lambda observation: observation.network,
    "chip": lambda observation: observation.chip,
}
_SCORES = ("n", "mape", "median_ape", "p90_ape", "within_10", "within_25", "bias", "rmse_s", "coverage_90", "mape_ci")
_LEVEL = 0.9

#: The largest counts that ``predict_time`` accepts; a larger count in a table is a broken cell.
_MOST = {"world_size": 10**6, "nodes": 10**6, "accumulation": 10**6, "per_gpu_batch_size": 10**9}
#: Squares of errors between these times neither overflow nor vanish.
_SHORTEST_S, _LONGEST_S = 1e-100, 1e100

#: The columns that a file of collective curves must have.
_CURVE_COLUMNS = ("collective", "gpu", "num_gpus", "num_nodes", "bytes", "seconds")
_CURVE_LIMITS = {"num_gpus": 1e6, "num_nodes": 1e6, "bytes": 1e18, "seconds": 1e6}
_CURVE_NUMBERS = (*_CURVE_LIMITS, "gpus_per_node", "healthy")
_CURVE_TEXT = ("collective", "curve_id", "source", "gpu", "intra_link", "inter_link", "nccl_version", "dtype", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTable:
    """The predicted rows of a table, and the number of the other rows by reason (``refused``).

    ``frame`` has the columns of ``PublicTable``, ``reason`` (the doubts about a row, blank for none) and ``family kind
    network chip regime answered_by``; the arrays have shape (rows,) in its order. ``is_covered`` says whether the
    measurement lies in its 90 % interval; it is None where intervals of another level were published.
    """

    frame: "pd.DataFrame"
    predicted_s: Floats
    measured_s: Floats
    is_covered: npt.NDArray[np.bool_] | None
    refused: dict[str, int]

    def summarise(self, *, by: Sequence[str] = ()) -> dict[str, Any]:
        """The scores of all rows, and of the rows of each value of the columns ``by`` (a blank value is ``""``).

        ``{"rows", "predicted", "refused": {reason: rows}, "overall": SCORES, "by": {column: {value: SCORES}}}`` with
        ``rows`` = ``predicted`` + the sum of ``refused``. SCORES are ``n mape median_ape p90_ape within_10 within_25
        bias rmse_s coverage_90 mape_ci``: fractions except ``n`` and ``rmse_s``; ``mape_ci`` is the 95 % interval of
        the MAPE over resampled rows.
        """
        return {
            "rows": len(self.frame) + sum(self.refused.values()),
            "predicted": len(self.frame),
            "refused": self.refused,
            "overall": self._score(np.arange(len(self.frame))),
            "by": {
                column: {value: self._score(rows) for value, rows in _group(self.frame[column]).items()}
                for column in dict.fromkeys(by)
            },
        }

    def _score(self, rows: npt.NDArray[np.intp]) -> dict[str, Any]:
        """The scores of the rows at these positions; each is None without rows."""
        if not len(rows):
            return dict.fromkeys(_SCORES) | {"n": 0}
        predicted, measured = self.predicted_s[rows], self.measured_s[rows]
        scores: dict[str, Any] = dict(score(predicted, measured))
        covered = None if self.is_covered is None else float(self.is_covered[rows].mean())
        scores |= {"n": len(rows), "coverage_90": covered, "mape_ci": list(bootstrap_mape(predicted, measured))}
        return {name: scores[name] for name in _SCORES}


def predict_table(
    path: str | None = None, *, published: PublishedPredictor | None, by: Iterable[str] = (), clean: bool = False
) -> PredictedTable:
    """Predict all rows of a CSV or Parquet file in the columns of the public table (default: the shipped table).

    ``published`` answers, or the closed forms where it is None. Seconds are those of an optimizer step, or of a
    micro-step in rows that state only those. Rows that are not understood, whose model is unknown, or without a finite
    answer are counted in ``refused``, each under one reason. Rows in doubt are predicted unless ``clean``. Columns in
    ``by`` are checked before the work. Raises ``InputError`` for a table without rows and for a column in ``by`` that
    does not exist, and as ``load_public_table``.
    """
    import pandas as pd

    table = load_public_table(path)
    rows = pd.concat([table.kept.assign(reason="", can_predict=True), table.quarantined], ignore_index=True)
    if not len(rows):
        raise InputError(f"{path} has no rows", expected="at least one row below the header")
    _check_by(by, [*rows.columns.drop("can_predict"), *_DERIVED, "regime", "answered_by"])

    refused: Counter[str] = Counter()
    can_predict = rows["can_predict"].astype(bool)
    if clean:
        can_predict &= rows["reason"].eq("")
    refused.update(_name_reason(reasons) for reasons in rows.loc[~can_predict, "reason"])
    rows = rows[can_predict]
    sound = _is_sound(rows)
    refused["number unusable"] += int((~sound).sum())
    rows = rows[sound].drop(columns="can_predict").reset_index(drop=True)

    observations, reasons = _observe(rows)
    refused.update(reasons)
    times_s, regimes, sources, level = _answer(observations, published)
    usable = (times_s[1] >= _SHORTEST_S) & (times_s[1] <= _LONGEST_S)
    refused[_NO_ANSWER] += int((~usable).sum())
    derived = {column: [read(observation) for observation in observations] for column, read in _DERIVED.items()}
    derived |= {"regime": regimes, "answered_by": sources}
    frame = rows.iloc[[observation.index for observation in observations]].reset_index(drop=True)
    added = {column: values for column, values in derived.items() if column not in frame}
    frame = frame.assign(**added)[usable].reset_index(drop=True)
    steps = _steps_in_time(frame)
    measured_s = frame["iteration_time_s"].to_numpy(np.float64) / steps
    low_s, predicted_s, high_s = times_s[:, usable] / steps
    return PredictedTable(
        frame=frame,
        predicted_s=predicted_s,
        measured_s=measured_s,
        is_covered=(low_s <= measured_s) & (measured_s <= high_s) if level == _LEVEL else None,
        refused={reason: count for reason, count in sorted(refused.items()) if count},
    )


def _check_by(by: Iterable[str], known: Sequence[str]) -> None:
    unknown = [column for column in by if column not in known]
    if unknown:
        raise InputError(
            "the rows lack columns to group by", got=", ".join(unknown), expected=f"some of {', '.join(known)}"
        )


def _name_reason(reasons: str) -> str:
    """The reason under which a row with several is counted: the first that prevents its prediction, else the first."""
    names = reasons.split(", ")
    return next((name for name in names if not REASONS[name].can_predict), names[0])


def _is_sound(rows: "pd.DataFrame") -> "pd.Series[bool]":
    """Whether ``predict_time`` accepts the counts, and the error of the time can be squared."""
    sound = rows["iteration_time_s"].between(_SHORTEST_S, _LONGEST_S)
    for column, most in _MOST.items():
        sound &= rows[column].le(most)
    return sound


def _steps_in_time(frame: "pd.DataFrame") -> Floats:
    """The divisor of the seconds of an optimizer step: its micro-steps where a row states only those, else 1."""
    only_micro = frame["seconds_per_iteration"].isna() & frame["samples_per_second"].isna()
    return frame["accumulation"].where(only_micro, 1.0).to_numpy(np.float64)


_OVERFLOWS = (ArithmeticError, ValueError)
_NO_ANSWER = "no finite answer"


def _call_in_halves(
    call: Callable[[int, int], Result], first: int, end: int
) -> Iterator[tuple[int, int, Result | None]]:
    """Call for all rows, or for ever smaller halves where the call overflows; yields first row, end and result.

    A table may hold numbers of any size. A single row that overflows has the result None and costs no other row.
    """
    if first == end:
        return
    try:
        result = call(first, end)
    except PrecisionTimeError:
        raise  # of the artifact, not of a row
    except _OVERFLOWS:
        if end - first == 1:
            yield first, end, None
            return
        middle = (first + end) // 2
        yield from _call_in_halves(call, first, middle)
        yield from _call_in_halves(call, middle, end)
        return
    yield first, end, result


def _observe(rows: "pd.DataFrame") -> tuple[list[Observation], list[str]]:
    """Rows as observations with their positions in ``rows``, and the reasons of the others."""
    observations: list[Observation] = []
    reasons: list[str] = []
    for first, _, part in _call_in_halves(lambda first, end: observe_table(rows.iloc[first:end]), 0, len(rows)):
        if part is None:
            reasons.append(_NO_ANSWER)
        else:
            # positions count from the first row of the part
            observations += [replace(observation, index=first + observation.index) for observation in part[0]]
            reasons += map(_shorten, part[1].values())
    return observations, reasons


def _shorten(reason: str) -> str:
    """A reason without the value of its row, so that rows refused for the same reason are counted together."""
    what = reason.partition("; got: ")[0]
    return "number unusable" if what.endswith("is not usable") else what


def _answer(
    observations: Sequence[Observation], published: PublishedPredictor | None
) -> tuple[Floats, list[str], list[str], float]:
    """Seconds (low, iteration, high) of shape (3, rows), NaN without an answer; regimes; sources; level."""
    times_s = np.full((3, len(observations)), np.nan)
    regimes, sources = [""] * len(observations), [""] * len(observations)
    level = _LEVEL
    queries = [observation.query for observation in observations]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for first, end, answers in _call_in_halves(
            lambda first, end: answer_queries(queries[first:end], published=published), 0, len(queries)
        ):
            if answers is None:
                continue
            times_s[:, first:end] = answers.low_s, answers.parts.iteration_time_s, answers.high_s
            regimes[first:end] = [regime.name for regime in answers.regimes]
            sources[first:end] = ["artifact" if by_artifact else "closed forms" for by_artifact in answers.by_artifact]
            level = answers.level
    return times_s, regimes, sources, level


def _group(values: "pd.Series[Any]") -> dict[str, npt.NDArray[np.intp]]:
    """Positions by value as text, sorted: a blank is ``""``, and whole numbers have no decimal point."""
    positions: dict[str, list[int]] = {}
    for position, value in enumerate(values.tolist()):
        positions.setdefault(_label(value), []).append(position)
    return {label: np.array(positions[label], dtype=np.intp) for label in sorted(positions, key=_order)}


def _label(value: object) -> str:
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    return "" if text.casefold() == "nan" else text


def _order(label: str) -> tuple[bool, float, str]:
    """Numbers by size, then texts in alphabetical order."""
    try:
        number = float(label)
    except ValueError:
        number = np.nan
    return (False, number, label) if np.isfinite(number) else (True, 0.0, label)


def evaluate_curves(path: str, *, by: Sequence[str] = ()) -> dict[str, Any]:
    """Errors of the network model on a CSV or Parquet file of collective curves, as ``evaluate_collectives``.

    Needs the columns ``collective gpu num_gpus num_nodes bytes seconds``. The other columns of the public curves
    (``inter_link``, ``intra_link``, ``gpus_per_node``, ``healthy``, ``notes``, ``source``) are used where they exist.
    A cell that is no usable number costs only its own row. Raises ``InputError`` for missing columns, a file without
    rows, or an unknown column in ``by``.
    """
    import pandas as pd

    frame = read_table(path, text=_CURVE_TEXT)
    missing = [column for column in _CURVE_COLUMNS if column not in frame]
    if missing:
        raise InputError(
            f"{path} lacks columns",
            got=", ".join(map(str, frame.columns))[:300],
            expected=", ".join(missing),
            fix="name the columns as the table of public curves does (predictor/data/collectives.parquet)",
        )
    if not len(frame):
        raise InputError(f"{path} has no rows", expected="at least one row below the header")
    for column in _CURVE_NUMBERS:
        if column in frame:
            numbers = pd.to_numeric(frame[column], errors="coerce").astype(float)
            frame[column] = numbers.where(numbers.abs().le(_CURVE_LIMITS.get(column, np.inf)))
    readable = frame.astype(object).where(frame.notna(), "")
    return evaluate_collectives(readable, by=by) if by else evaluate_collectives(readable)
