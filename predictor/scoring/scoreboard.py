"""Text of cross-validations: a table of every split with its goal and every method, and the worst groups of rows."""

from collections.abc import Mapping, Sequence

import numpy as np

from precision_time.predictor.learning.splits import NO_GOAL, SPLITS, Goal
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import SPEED_UP, WITHOUT_CONTESTS, CrossValidation
from precision_time.predictor.scoring.metrics import score

__all__ = ["METHOD_TITLES", "format_cross_validation", "format_percent", "title_split", "worst_groups"]

#: The speed-up is no split: it follows from the predictions of another one.
_SPEED_UP_TITLE, _SPEED_UP_GOAL = "speed-up over fp32 or tf32", Goal(median=0.07)

METHOD_TITLES = {
    "predictor": "predictor",
    "precision_blind": "precision-blind",
    "roofline": "roofline x factor",
    "closed_form": "closed forms",
    "no_blend": "trees alone",
    "direct": "direct, not residual",
    "no_closed_form": "no closed form",
    "stages": "stages alone",
}


def format_percent(value: float | None) -> str:
    """A fraction in per cent, a dash for none."""
    return "-" if value is None else f"{100 * value:.1f}"


def title_split(split: str) -> str:
    """The name of a split for people."""
    if split == SPEED_UP:
        return _SPEED_UP_TITLE
    if split.endswith(WITHOUT_CONTESTS):
        return "- " + WITHOUT_CONTESTS.strip()
    return SPLITS[split].title


def _goal_of(split: str) -> Goal:
    if split == SPEED_UP:
        return _SPEED_UP_GOAL
    return SPLITS[split].goal if split in SPLITS else NO_GOAL


def format_cross_validation(results: Mapping[str, CrossValidation]) -> str:
    """A markdown table with aligned columns: MAPE / median error in per cent.

    One line a split: rows, the goal, the errors of the predictor, whether both meet the goal, the share of rows inside
    their interval, then the errors of the other methods.
    """
    methods = [name for name in METHOD_TITLES if any(name in result.predicted_s for result in results.values())]
    others = [name for name in methods if name != "predictor"]
    lines = [["split", "rows", "goal", "predictor", "met", "covered", *(METHOD_TITLES[name] for name in others)]]
    for split, result in results.items():
        metrics = result.metrics()
        figures = {name: (values["mape"], values["median_ape"]) for name, values in metrics.items()}
        goal = _goal_of(split)
        limits = [
            (limit, figure) for limit, figure in zip(goal, figures["predictor"], strict=True) if limit is not None
        ]
        met = all(figure is not None and figure <= limit for limit, figure in limits)
        lines.append(
            [
                title_split(split),
                str(len(result.rows)),
                _pair(goal) if limits else "-",
                _pair(figures["predictor"]),
                ("yes" if met else "no") if limits else "-",
                format_percent(metrics["predictor"]["coverage"]),
                *(_pair(figures[name]) if name in figures else "-" for name in others),
            ]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join(shown) + "\n"


def _pair(figures: tuple[float | None, float | None]) -> str:
    return " / ".join(format_percent(figure) for figure in figures)


#: Smaller groups are not listed.
_FEWEST_IN_GROUP = 5


def worst_groups(
    result: CrossValidation, observations: Sequence[Observation], *, count: int = 20
) -> list[dict[str, str | float]]:
    """The ``count`` groups of rows of one source, network and GPU with the largest MAPE, worst first.

    Each group holds ``source``, ``network``, ``gpu``, ``n``, ``mape``, ``bias`` (positive: predicted too slow),
    ``error_share`` (of the summed absolute error of all rows), and ``mape`` and ``bias`` of the closed forms as
    ``closed_form_mape`` and ``closed_form_bias``.
    """
    positions_by_group: dict[tuple[str, str, str], list[int]] = {}
    for position, row in enumerate(result.rows):
        observation = observations[row]
        key = (observation.measurement.source, observation.network, observation.setup.hardware.name)
        positions_by_group.setdefault(key, []).append(position)
    errors = np.abs(result.predicted_s["predictor"] - result.measured_s) / result.measured_s
    groups: list[dict[str, str | float]] = []
    for (source, network, gpu), positions in positions_by_group.items():
        if len(positions) < _FEWEST_IN_GROUP:
            continue
        group: dict[str, str | float] = {"source": source, "network": network, "gpu": gpu, "n": float(len(positions))}
        group["error_share"] = float(errors[positions].sum() / errors.sum())
        for method, prefix in (("predictor", ""), ("closed_form", "closed_form_")):
            if method in result.predicted_s:
                scores = score(result.predicted_s[method][positions], result.measured_s[positions])
                group |= {f"{prefix}{name}": value for name in ("mape", "bias") if (value := scores[name]) is not None}
        groups.append(group)
    return sorted(groups, key=lambda group: -float(group["mape"]))[:count]
