"""Ablations: predictors that leave out one part of the method, to measure what that part gives."""

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.features import CLOSED_FORM_FEATURES, SETUP_FEATURES

__all__ = ["ABLATIONS"]


class _NoBlend(HierarchicalPredictor):
    """The trees alone, however far the question is from the data."""

    __slots__ = ()
    has_blend = False


class _Direct(_NoBlend):
    """The time itself instead of its ratio to the closed form, which stays a column."""

    __slots__ = ()
    total_is_ratio = False


class _NoClosedForm(_Direct):
    """The time itself, from columns that no closed form fills."""

    __slots__ = ()
    total_features = tuple(name for name in SETUP_FEATURES if name not in CLOSED_FORM_FEATURES)


class _Stages(_NoBlend):
    """Compute, communication and the exposed share, without a model of the whole iteration."""

    __slots__ = ()
    has_total = False


#: On few rows, where the stages decide the iteration, all of these are the same predictor.
ABLATIONS: dict[str, type[HierarchicalPredictor]] = {
    "no_blend": _NoBlend,
    "direct": _Direct,
    "no_closed_form": _NoClosedForm,
    "stages": _Stages,
}
