"""The figures of a cross-validation side by side: every split with its goal, every method, and the worst groups."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from precision_time.predictor.learning.splits import NO_GOAL, SPLITS, Goal
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import SPEED_UP, WITHOUT_CONTESTS, CrossValidation
from precision_time.predictor.scoring.metrics import score
from precision_time.storage.errors import InputError

__all__ = ["GROUPINGS", "METHOD_TITLES", "format_cross_validation", "title_split", "worst_groups"]

#: The speed-up has no split of its own: it follows from the predictions of another.
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


def _percent(value: float | None) -> str:
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
    """The same figures for people, as a markdown table with aligned columns: MAPE / median error in per cent.

    One line a split: rows, the goal, what the predictor reached, whether both figures meet the goal, the share of rows
    inside their interval, then the other methods.
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
                _percent(metrics["predictor"]["coverage"]),
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
    return " / ".join(_percent(figure) for figure in figures)


#: What rows can be grouped by.
GROUPINGS: dict[str, Callable[[Observation], str]] = {
    "source": lambda observation: observation.measurement.source,
    "model": lambda observation: observation.measurement.model,
    "network": lambda observation: observation.network,
    "family": lambda observation: observation.setup.workload.family,
    "kind": lambda observation: observation.setup.workload.kind,
    "gpu": lambda observation: observation.setup.hardware.name,
    "chip": lambda observation: observation.chip,
    "precision": lambda observation: observation.setup.precision.name,
    "framework": lambda observation: observation.measurement.framework,
    "world_size": lambda observation: str(observation.setup.world_size),
}


def worst_groups(
    result: CrossValidation,
    observations: Sequence[Observation],
    *,
    by: Sequence[str] = ("source", "network", "gpu"),
    count: int = 20,
    fewest: int = 5,
) -> list[dict[str, str | float]]:
    """The ``count`` groups of at least ``fewest`` rows with the largest MAPE, worst first.

    ``by`` names columns of ``GROUPINGS``. Each group holds its columns, ``n``, ``mape``, ``bias`` (positive: predicted
    too slow), ``error_share`` (of the summed absolute error of all rows), and ``mape`` and ``bias`` of the closed forms
    as ``closed_form_mape`` and ``closed_form_bias``. Raises ``InputError`` for an unknown column.
    """
    unknown = [name for name in by if name not in GROUPINGS]
    if unknown:
        raise InputError("unknown grouping", got=", ".join(unknown), expected=", ".join(GROUPINGS))
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, row in enumerate(result.rows):
        groups.setdefault(tuple(GROUPINGS[name](observations[row]) for name in by), []).append(position)
    errors = np.abs(result.predicted_s["predictor"] - result.measured_s) / result.measured_s
    found: list[dict[str, str | float]] = []
    for key, positions in groups.items():
        if len(positions) < fewest:
            continue
        scores = {
            method: score(result.predicted_s[method][positions], result.measured_s[positions])
            for method in ("predictor", "closed_form")
            if method in result.predicted_s
        }
        figures = {f"{method}_{name}": scores[method][name] for method in scores for name in ("mape", "bias")}
        found.append(
            dict(zip(by, key, strict=True))
            | {"n": float(len(positions)), "error_share": float(errors[positions].sum() / errors.sum())}
            | {name.removeprefix("predictor_"): value for name, value in figures.items() if value is not None}
        )
    return sorted(found, key=lambda group: -float(group["mape"]))[:count]
