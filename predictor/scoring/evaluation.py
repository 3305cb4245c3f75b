"""How far predictions are from measured rows: each row of a table predicted, or counted with the reason it is not."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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

__all__ = ["COLLECTIVE_COLUMNS", "PredictedTable", "evaluate_curves", "evaluate_measurements", "predict_table"]

Floats = npt.NDArray[np.float64]

#: Columns that a predicted row has beside those of the table; a column of the file with such a name goes first.
_DERIVED: dict[str, Callable[[Observation], str]] = {
    "family": lambda seen: seen.setup.workload.family,
    "kind": lambda seen: seen.setup.workload.kind,
    "network": lambda seen: seen.network,
    "chip": lambda seen: seen.chip,
}
_SCORES = ("n", "mape", "median_ape", "p90_ape", "within_10", "within_25", "bias", "rmse_s", "coverage_90", "mape_ci")
_LEVEL = 0.9

#: The largest counts that ``predict_time`` takes; a larger one in a table is a broken cell.
_MOST = {"world_size": 10**6, "nodes": 10**6, "accumulation": 10**6, "per_gpu_batch_size": 10**9}
_SHORTEST_S, _LONGEST_S = 1e-100, 1e100  # their errors can be squared

#: What the columns of a file of collective curves must be called.
COLLECTIVE_COLUMNS = ("collective", "gpu", "num_gpus", "num_nodes", "bytes", "seconds")
_CURVE_LIMITS = {"num_gpus": 1e6, "num_nodes": 1e6, "bytes": 1e18, "seconds": 1e6}
_CURVE_NUMBERS = (*_CURVE_LIMITS, "gpus_per_node", "healthy")
_CURVE_TEXT = ("collective", "curve_id", "source", "gpu", "intra_link", "inter_link", "nccl_version", "dtype", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedTable:
    """The rows of a table that could be predicted, and how many others there are by reason.

    ``frame`` has the columns of ``PublicTable``, ``reason`` (the doubts about a row, blank for none) and ``family kind
    network chip regime answered_by``; the arrays have shape (rows,) in its order. ``is_covered`` tells which
    measurements lie in their 90 % interval and is None where intervals of another level were published.
    """

    frame: "pd.DataFrame"
    predicted_s: Floats
    measured_s: Floats
    is_covered: npt.NDArray[np.bool_] | None
    refused: dict[str, int]

    def summarise(self, *, by: Sequence[str] = ()) -> dict[str, Any]:
        """``{"rows", "predicted", "refused", "overall", "by"}`` as ``evaluate_measurements`` returns it."""
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
        """The scores of these rows (positions); None for each where there is no row."""
        if not len(rows):
            return dict.fromkeys(_SCORES) | {"n": 0}
        predicted, measured = self.predicted_s[rows], self.measured_s[rows]
        scores: dict[str, Any] = dict(score(predicted, measured))
        covered = None if self.is_covered is None else float(self.is_covered[rows].mean())
        scores |= {"n": len(rows), "coverage_90": covered, "mape_ci": list(bootstrap_mape(predicted, measured))}
        return {name: scores[name] for name in _SCORES}


def evaluate_measurements(
    path: str, *, published: PublishedPredictor | None, by: Sequence[str] = (), clean: bool = False
) -> dict[str, Any]:
    """Predict every row of a CSV or Parquet file in the columns of the public table, and compare.

    ``{"rows", "predicted", "refused": {reason: rows}, "overall": SCORES, "by": {column: {value: SCORES}}}`` with
    ``rows`` = ``predicted`` + the sum of ``refused``; SCORES are ``n mape median_ape p90_ape within_10 within_25 bias
    rmse_s coverage_90 mape_ci``, fractions except ``n`` and ``rmse_s``, ``mape_ci`` the 95 % interval of the MAPE over
    resampled rows. ``published`` answers, the closed forms where it is None. ``by`` names columns of a
    ``PredictedTable``; blank values are grouped as ``""``. ``clean`` leaves out rows in doubt.

    Raises ``InputError`` for a file without rows, and as ``load_public_table`` and ``PredictedTable`` do.
    """
    return predict_table(path, published=published, by=by, clean=clean).summarise(by=by)


def predict_table(
    path: str | None = None, *, published: PublishedPredictor | None, by: Iterable[str] = (), clean: bool = False
) -> PredictedTable:
    """Predict the rows of a file (or of the shipped table), one call for all of them.

    Measured and predicted are seconds of an optimizer step, or of a micro-step in rows that state nothing else. Rows
    that are not understood, of unknown work, or without a finite answer are counted in ``refused``, each under one
    reason; rows in doubt are predicted unless ``clean``. Raises ``InputError`` for a table without rows and for
    columns in ``by`` that it will not have, before the work.
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

    seen, reasons_by_row = _observe(rows)
    refused.update(reasons_by_row)
    answered = _answer(seen, published)
    usable = (answered.iteration_time_s >= _SHORTEST_S) & (answered.iteration_time_s <= _LONGEST_S)
    refused[_NO_ANSWER] += int((~usable).sum())
    derived = {column: [read(one) for one in seen] for column, read in _DERIVED.items()}
    derived |= {"regime": answered.regimes, "answered_by": answered.sources}
    frame = rows.iloc[[one.index for one in seen]].reset_index(drop=True)
    own = [column for column in derived if column not in frame]
    frame = frame.assign(**{column: derived[column] for column in own})[usable].reset_index(drop=True)
    steps = _steps_in_time(frame)
    measured_s = frame["iteration_time_s"].to_numpy(np.float64) / steps
    low_s, predicted_s, high_s = (
        values[usable] / steps for values in (answered.low_s, answered.iteration_time_s, answered.high_s)
    )
    return PredictedTable(
        frame=frame,
        predicted_s=predicted_s,
        measured_s=measured_s,
        is_covered=(low_s <= measured_s) & (measured_s <= high_s) if answered.level == _LEVEL else None,
        refused={reason: count for reason, count in sorted(refused.items()) if count},
    )


def _check_by(by: Iterable[str], known: Sequence[str]) -> None:
    unknown = [column for column in by if column not in known]
    if unknown:
        raise InputError(
            "the rows lack columns to group by", got=", ".join(unknown), expected=f"some of {', '.join(known)}"
        )


def _name_reason(reasons: str) -> str:
    """The one reason under which a row that has several is counted: the first that forbids to predict it."""
    words = reasons.split(", ")
    return next((word for word in words if not REASONS[word].can_predict), words[0])


def _is_sound(rows: "pd.DataFrame") -> "pd.Series[bool]":
    """Whether counts are such as ``predict_time`` takes, and errors of the time can be told."""
    sound = rows["iteration_time_s"].between(_SHORTEST_S, _LONGEST_S)
    for column, most in _MOST.items():
        sound &= rows[column].le(most)
    return sound


def _steps_in_time(frame: "pd.DataFrame") -> Floats:
    """By what to divide the seconds of an optimizer step: its micro-steps where a row states those alone, else 1."""
    only_micro = frame["seconds_per_iteration"].isna() & frame["samples_per_second"].isna()
    return frame["accumulation"].where(only_micro, 1.0).to_numpy(np.float64)


# A figure of any size may stand in a table. What overflows in the middle of a bulk call is found by halves, so that
# it costs its own row alone.
_OVERFLOWS = (ArithmeticError, ValueError)
_NO_ANSWER = "no finite answer"


def _observe(rows: "pd.DataFrame") -> tuple[list[Observation], list[str]]:
    """Rows as observations that carry their position, and the reasons of the others."""
    seen: list[Observation] = []
    reasons: list[str] = []

    def observe(first: int, end: int) -> None:
        try:
            found, refused = observe_table(rows.iloc[first:end])
        except _OVERFLOWS:
            if end - first == 1:
                reasons.append(_NO_ANSWER)
                return
            middle = (first + end) // 2
            observe(first, middle)
            observe(middle, end)
            return
        # its positions count from the first of the rows that it was given
        seen.extend(one if not first else replace(one, index=first + one.index) for one in found)
        reasons.extend(_shorten(reason) for reason in refused.values())

    observe(0, len(rows))
    return seen, reasons


def _shorten(reason: str) -> str:
    """Without what differs from row to row, so that rows of one trouble are counted together."""
    what = reason.partition("; got: ")[0]
    return "number unusable" if what.endswith("is not usable") else what


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answered:
    """Answers side by side, each of shape (queries,); NaN seconds where there is none."""

    low_s: Floats
    iteration_time_s: Floats
    high_s: Floats
    regimes: list[str]
    sources: list[str]
    level: float


def _answer(seen: Sequence[Observation], published: PublishedPredictor | None) -> _Answered:
    low_s, iteration_time_s, high_s = (np.full(len(seen), np.nan) for _ in range(3))
    regimes, sources = [""] * len(seen), [""] * len(seen)
    level = _LEVEL

    def answer(first: int, end: int) -> None:
        nonlocal level
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                answers = answer_queries([one.query for one in seen[first:end]], published=published)
        except PrecisionTimeError:
            raise  # of the artifact, not of a row
        except _OVERFLOWS:
            if end - first > 1:
                middle = (first + end) // 2
                answer(first, middle)
                answer(middle, end)
            return
        low_s[first:end], high_s[first:end] = answers.low_s, answers.high_s
        iteration_time_s[first:end] = answers.parts.iteration_time_s
        regimes[first:end] = [regime.name for regime in answers.regimes]
        sources[first:end] = ["artifact" if its else "closed forms" for its in answers.by_artifact]
        level = answers.level

    if seen:
        answer(0, len(seen))
    return _Answered(
        low_s=low_s, iteration_time_s=iteration_time_s, high_s=high_s, regimes=regimes, sources=sources, level=level
    )


def _group(values: "pd.Series[Any]") -> dict[str, npt.NDArray[np.intp]]:
    """Positions by value as text, in order: blanks are ``""``, whole numbers have no point."""
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
    """Numbers by size, then texts by the alphabet."""
    try:
        number = float(label)
    except ValueError:
        number = np.nan
    return (False, number, label) if np.isfinite(number) else (True, 0.0, label)


def evaluate_curves(path: str, *, by: Sequence[str] = ()) -> dict[str, Any]:
    """Errors of the network model on a CSV or Parquet file of collective curves, as ``evaluate_collectives``.

    Needs ``COLLECTIVE_COLUMNS``; others of ``collectives.csv`` (``inter_link``, ``intra_link``, ``gpus_per_node``,
    ``healthy``, ``notes``, ``source``) sharpen the description where they are there. A cell that is no usable number
    costs its row alone. Raises ``InputError`` for missing columns, a file without rows, or an unknown column in ``by``.
    """
    import pandas as pd

    frame = read_table(path, text=_CURVE_TEXT)
    missing = [column for column in COLLECTIVE_COLUMNS if column not in frame]
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
