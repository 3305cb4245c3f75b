"""Answers: what a published predictor, or the closed forms alone, say to queries, with intervals and regimes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.hierarchy import PredictedParts, closed_parts
from precision_time.predictor.rows.features import Query

__all__ = ["CLOSED_FORM_LEVEL", "CLOSED_FORM_RADIUS", "Answers", "answer_queries"]

#: Half width of the interval where no artifact applies, in log seconds: a rule of thumb. Of 960 public rows of
#: ResNet-18 and -50, BERT-base and ViT-B/16 (1 to 32 GPUs, 20 kinds, GTX 1080 Ti to B200) 90 % lie within a factor
#: of 1.55; of BERT-base alone, the worst, within 2.5. The closed forms' constants were fitted on some of these rows.
CLOSED_FORM_RADIUS = math.log(2.5)
CLOSED_FORM_LEVEL = 0.9


#: Gaps that make a regime what it is: its radius was calibrated for these and no further one.
_OWN_GAPS = {
    "known": 0,
    "new pair": 1,
    "new gpu": 1,
    "new model": 1,
    "new family": 1,
    "new model and gpu": 2,
    "beyond scale": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One answer a query; arrays have shape (queries,).

    ``low_s`` and ``high_s`` bound the iteration time at ``level``. ``regimes`` says how far each query is from the
    training data, ``gaps`` in words what of it the data never held, and ``by_artifact`` whether the trees had a say
    (else the closed forms answer).
    """

    parts: PredictedParts
    low_s: npt.NDArray[np.float64]
    high_s: npt.NDArray[np.float64]
    level: float
    regimes: tuple[str, ...]
    gaps: tuple[tuple[str, ...], ...]
    by_artifact: npt.NDArray[np.bool_]
    #: whether the interval was calibrated for such a query
    calibrated: npt.NDArray[np.bool_]
    #: by which measured rows each answer was corrected, in words; blank without any measured
    corrections: tuple[str, ...] = ()


def answer_queries(queries: Sequence[Query], *, published: PublishedPredictor | None) -> Answers:
    """What ``published`` says to each query, with the interval of its regime; the closed forms where there is none.

    The interval of a regime holds where nothing else was new than what names the regime; a query with a further gap
    gets the widest interval at hand, and so does one that the closed forms answer, whose interval is a rule of thumb.
    """
    if published is None:
        parts = closed_parts(queries)
        regimes = ("new model and gpu",) * len(queries)
        gaps: tuple[tuple[str, ...], ...] = ((),) * len(queries)
        by_artifact = np.zeros(len(queries), dtype=np.bool_)
        calibrated = by_artifact
        radius, level = np.full(len(queries), CLOSED_FORM_RADIUS), CLOSED_FORM_LEVEL
    else:
        predictor = published.predictor
        parts, level = predictor.predict(queries), predictor.level
        regimes = tuple(predictor.domain.regime_of(query.setup) for query in queries)
        gaps = tuple(tuple(predictor.domain.list_gaps(query.setup)) for query in queries)
        by_artifact = np.array([predictor.lean_of(query).weight > 0 for query in queries], dtype=np.bool_)
        widest = max([CLOSED_FORM_RADIUS, *predictor.radii.values()])
        calibrated = np.array(
            [
                bool(trusted) and regime in predictor.radii and len(found) <= _OWN_GAPS[regime]
                for regime, found, trusted in zip(regimes, gaps, by_artifact, strict=True)
            ],
            dtype=np.bool_,
        )
        radius = np.array(
            [predictor.radii[regime] if sure else widest for regime, sure in zip(regimes, calibrated, strict=True)]
        )
    spread = np.exp(radius)
    return Answers(
        parts=parts,
        low_s=parts.iteration_time_s / spread,
        high_s=parts.iteration_time_s * spread,
        level=level,
        regimes=regimes,
        gaps=gaps,
        by_artifact=by_artifact,
        calibrated=calibrated,
    )
