"""The drift watch: whether measurements that came after the champion still lie in the intervals it gave them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from precision_time.predictor.answering.answers import Answers, answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.rows.observations import Observation
from precision_time.tasks.publishing.gate import correct_for_many
from precision_time.tasks.publishing.validate import chance_of_coverage

__all__ = ["DriftReport", "DriftRow", "Verdict", "watch_drift"]

Verdict = Literal["holds", "drifting", "too few"]
Grouping = Literal["all", "gpu", "model"]

#: With 8 rows half of them outside is already rarer than one in a hundred at 90 %; with fewer hardly anything is.
FEWEST_ROWS = 8
#: Nights come often, so that a false alarm must be rare: one of a hundred looks at new rows.
SIGNIFICANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRow:
    """New measurements of one group against the champion's intervals.

    ``rows`` are the new ones, ``judged`` those with a calibrated interval, ``inside`` how many of these it held.
    ``chance`` is the probability of as few, or fewer, inside if the level holds, allowing for the number of groups;
    None with too few. ``bias`` is the median of measured over predicted of all rows: 1.3 is 30 % slower than predicted.
    """

    by: Grouping
    group: str
    rows: int
    judged: int
    inside: int
    chance: float | None
    bias: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """What the watch saw: the verdict over all, and a row for everything, each GPU and each model."""

    champion: str
    level: float
    verdict: Verdict
    rows: tuple[DriftRow, ...]

    @property
    def drifting(self) -> tuple[DriftRow, ...]:
        """The groups that drift."""
        return tuple(row for row in self.rows if row.verdict == "drifting")

    @property
    def summary(self) -> str:
        """The verdict in a line."""
        if not self.rows:
            return f"drift: no measurement is new since {self.champion}"
        whole = self.rows[0]
        told = f"{whole.inside} of {whole.judged} new rows inside {self.champion}'s {self.level:.0%} intervals"
        where = ", ".join(f"{row.by} {row.group}" if row.by != "all" else "all rows" for row in self.drifting)
        return f"drift: {self.verdict}; {told}, median of measured over predicted {whole.bias:.2f}" + (
            f"; drifting: {where}" if where else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """What JSON keeps of it."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def table(self) -> list[dict[str, str | int | float | None]]:
        """One row a group, for people."""
        return [
            {
                "by": row.by,
                "group": row.group,
                "new rows": row.rows,
                "with interval": row.judged,
                "inside": row.inside,
                "share inside": round(row.inside / row.judged, 3) if row.judged else None,
                "level": self.level,
                "chance": None if row.chance is None else round(row.chance, 4),
                "measured / predicted": round(row.bias, 3),
                "verdict": row.verdict,
            }
            for row in self.rows
        ]


def watch_drift(rows: Sequence[Observation], *, champion: PublishedPredictor) -> DriftReport:
    """Put ``rows``, measured after ``champion`` was trained, to its intervals: all together, by GPU and by model.

    An interval of level p holds a row with probability p, so that the count inside is binomial; a group drifts when so
    few inside are rarer than 1 % (Holm's correction over the groups). Rows that the champion gave no calibrated
    interval count for the bias alone. A group with fewer than 8 judged rows is too few to say; so is the whole.
    """
    name = champion.manifest.artifact_id
    level = champion.predictor.level
    if not rows:
        return DriftReport(champion=name, level=level, verdict="too few", rows=())
    answers = answer_queries([seen.query for seen in rows], published=champion)
    measured = np.array([seen.measurement.iteration_time_s for seen in rows])
    groups: list[tuple[Grouping, str, npt.NDArray[np.bool_]]] = [("all", "all", np.ones(len(rows), dtype=np.bool_))]
    gpus = np.array([seen.measurement.gpu for seen in rows], dtype=np.str_)
    models = np.array([seen.network for seen in rows], dtype=np.str_)
    groups += [("gpu", str(gpu), gpus == gpu) for gpu in np.unique(gpus)]
    groups += [("model", str(model), models == model) for model in np.unique(models)]
    found = [_judge(by, group, chosen, measured=measured, answers=answers) for by, group, chosen in groups]
    corrected = iter(correct_for_many([row.chance for row in found if row.chance is not None]))
    told = []
    for row in found:
        chance = None if row.chance is None else next(corrected)
        verdict: Verdict = "too few" if chance is None else "drifting" if chance < SIGNIFICANCE else "holds"
        told.append(replace(row, chance=chance, verdict=verdict))
    drifts = any(row.verdict == "drifting" for row in told)
    return DriftReport(champion=name, level=level, verdict="drifting" if drifts else told[0].verdict, rows=tuple(told))


def _judge(
    by: Grouping,
    group: str,
    chosen: npt.NDArray[np.bool_],
    *,
    measured: npt.NDArray[np.float64],
    answers: Answers,
) -> DriftRow:
    held = (answers.low_s <= measured) & (measured <= answers.high_s)
    judged = chosen & answers.has_own_interval
    count, inside = int(judged.sum()), int((judged & held).sum())
    return DriftRow(
        by=by,
        group=group,
        rows=int(chosen.sum()),
        judged=count,
        inside=inside,
        chance=chance_of_coverage(inside, count, answers.level) if count >= FEWEST_ROWS else None,
        bias=float(np.median(measured[chosen] / answers.parts.iteration_time_s[chosen])),
        verdict="too few",
    )
