"""The drift watch: whether new measurements still lie inside the champion's intervals."""

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

#: Of 8 rows, 4 outside have a chance of less than 1 % at a level of 90 %; with fewer rows hardly any result is so rare.
FEWEST_ROWS = 8
#: The watch runs every night, so a false alarm must be rare: one in a hundred looks at new rows.
SIGNIFICANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRow:
    """New measurements of one group, compared with the champion's intervals.

    ``rows`` counts the new rows, ``judged`` those with a calibrated interval, ``inside`` those inside it. ``chance`` is
    the probability of as few or fewer inside if the level holds, corrected for the number of groups; None with too few
    rows. ``bias`` is the median of measured over predicted of all rows: 1.3 means 30 % slower than predicted.
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
    """The result of the watch: the overall verdict, and a row for all measurements, each GPU and each model."""

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
        overall = self.rows[0]
        inside = f"{overall.inside} of {overall.judged} new rows inside {self.champion}'s {self.level:.0%} intervals"
        groups = ", ".join(f"{row.by} {row.group}" if row.by != "all" else "all rows" for row in self.drifting)
        return f"drift: {self.verdict}; {inside}, median of measured over predicted {overall.bias:.2f}" + (
            f"; drifting: {groups}" if groups else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def table(self) -> list[dict[str, str | int | float | None]]:
        """One row per group, for people."""
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
    """Compare ``rows``, measured after ``champion`` was trained, with its intervals: all together, by GPU and by model.

    An interval of level p contains a row with probability p, so the count inside is binomial. A group drifts if so few
    inside have a chance below 1 % (Holm's correction over the groups). Rows without a calibrated interval count for the
    bias alone. A group, or all rows together, with fewer than 8 judged rows gets the verdict ``too few``.
    """
    name = champion.manifest.artifact_id
    level = champion.predictor.level
    if not rows:
        return DriftReport(champion=name, level=level, verdict="too few", rows=())
    answers = answer_queries([row.query for row in rows], published=champion)
    measured_s = np.array([row.measurement.iteration_time_s for row in rows])
    groups: list[tuple[Grouping, str, npt.NDArray[np.bool_]]] = [("all", "all", np.ones(len(rows), dtype=np.bool_))]
    gpus = np.array([row.measurement.gpu for row in rows], dtype=np.str_)
    models = np.array([row.network for row in rows], dtype=np.str_)
    groups += [("gpu", str(gpu), gpus == gpu) for gpu in np.unique(gpus)]
    groups += [("model", str(model), models == model) for model in np.unique(models)]
    uncorrected = [_judge(by, group, members, measured_s=measured_s, answers=answers) for by, group, members in groups]
    corrected = iter(correct_for_many([row.chance for row in uncorrected if row.chance is not None]))
    judged = []
    for row in uncorrected:
        chance = None if row.chance is None else next(corrected)
        verdict: Verdict = "too few" if chance is None else "drifting" if chance < SIGNIFICANCE else "holds"
        judged.append(replace(row, chance=chance, verdict=verdict))
    overall = "drifting" if any(row.verdict == "drifting" for row in judged) else judged[0].verdict
    return DriftReport(champion=name, level=level, verdict=overall, rows=tuple(judged))


def _judge(
    by: Grouping,
    group: str,
    members: npt.NDArray[np.bool_],
    *,
    measured_s: npt.NDArray[np.float64],
    answers: Answers,
) -> DriftRow:
    is_inside = (answers.low_s <= measured_s) & (measured_s <= answers.high_s)
    judged = members & answers.has_own_interval
    count, inside = int(judged.sum()), int((judged & is_inside).sum())
    return DriftRow(
        by=by,
        group=group,
        rows=int(members.sum()),
        judged=count,
        inside=inside,
        chance=chance_of_coverage(inside, count, answers.level) if count >= FEWEST_ROWS else None,
        bias=float(np.median(measured_s[members] / answers.parts.iteration_time_s[members])),
        verdict="too few",
    )
