"""Answers: the times that a published predictor, or the closed forms alone, give for queries, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend
from precision_time.predictor.learning.hierarchy import PredictedParts, closed_parts
from precision_time.predictor.learning.regimes import REGIMES, Regime
from precision_time.predictor.rows.features import Query

__all__ = ["CLOSED_FORM_LEVEL", "CLOSED_FORM_RADIUS", "Answers", "answer_queries"]

#: Half width of the interval of the closed forms, in log seconds: a rule of thumb. Of 960 public rows of ResNet-18 and
#: -50, BERT-base and ViT-B/16 (1 to 32 GPUs, 20 kinds, GTX 1080 Ti to B200) 90 % lie within a factor of 1.55; of
#: BERT-base alone, the worst, within 2.5. The constants of the closed forms were fitted on some of these rows.
CLOSED_FORM_RADIUS = math.log(2.5)
CLOSED_FORM_LEVEL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One answer for each query; arrays have shape (queries,).

    ``low_s`` and ``high_s`` bound the iteration time at ``level``. ``regimes`` say how far each query is from the
    training data, ``gaps`` what the data lacks, and ``blends`` weigh the trees against the closed forms.
    """

    parts: PredictedParts
    low_s: npt.NDArray[np.float64]
    high_s: npt.NDArray[np.float64]
    level: float
    regimes: tuple[Regime, ...]
    gaps: tuple[tuple[str, ...], ...]
    blends: tuple[Blend, ...]
    #: whether the interval was fitted for such a query; otherwise it is the widest
    has_own_interval: npt.NDArray[np.bool_]
    #: which measured rows corrected each answer; empty without measured rows
    corrections: tuple[str, ...] = ()

    @property
    def by_artifact(self) -> npt.NDArray[np.bool_]:
        """Whether the trees have any weight; otherwise the closed forms answer."""
        return np.array([blend.weight > 0 for blend in self.blends], dtype=np.bool_)


def answer_queries(queries: Sequence[Query], *, published: PublishedPredictor | None) -> Answers:
    """The answer of ``published`` to each query, with the interval of its regime; that of the closed forms without it.

    The interval of a regime is fitted for questions with no gaps beyond those that define the regime. A query with more
    gaps gets the widest interval, and so does a query that the closed forms answer: their interval is a rule of thumb.
    """
    if published is None:
        return _answer_by_closed_forms(queries)
    predictor = published.predictor
    regimes = tuple(predictor.domain.regime_of(query.setup) for query in queries)
    gaps = tuple(tuple(predictor.domain.list_gaps(query.setup)) for query in queries)
    blends = tuple(predictor.blend_of(query.setup, regime) for query, regime in zip(queries, regimes, strict=True))
    has_own_interval = np.array(
        [
            blend.weight > 0 and regime.name in predictor.radii and len(query_gaps) <= regime.gaps
            for regime, query_gaps, blend in zip(regimes, gaps, blends, strict=True)
        ],
        dtype=np.bool_,
    )
    widest = max([CLOSED_FORM_RADIUS, *predictor.radii.values()])
    radius = np.array(
        [
            predictor.radii[regime.name] if is_fitted else widest
            for regime, is_fitted in zip(regimes, has_own_interval, strict=True)
        ]
    )
    parts = predictor.predict(queries, blends)
    return Answers(
        parts=parts,
        low_s=parts.iteration_time_s / np.exp(radius),
        high_s=parts.iteration_time_s * np.exp(radius),
        level=predictor.level,
        regimes=regimes,
        gaps=gaps,
        blends=blends,
        has_own_interval=has_own_interval,
    )


def _answer_by_closed_forms(queries: Sequence[Query]) -> Answers:
    parts, spread = closed_parts(queries), np.exp(np.full(len(queries), CLOSED_FORM_RADIUS))
    return Answers(
        parts=parts,
        low_s=parts.iteration_time_s / spread,
        high_s=parts.iteration_time_s * spread,
        level=CLOSED_FORM_LEVEL,
        regimes=(REGIMES["new model and gpu"],) * len(queries),
        gaps=((),) * len(queries),
        blends=(CLOSED_FORM_ONLY,) * len(queries),
        has_own_interval=np.zeros(len(queries), dtype=np.bool_),
    )
