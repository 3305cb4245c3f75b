"""The accuracy report of a retraining as markdown, with every split beside its baselines."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from precision_time.predictor.scoring.scoreboard import METHOD_TITLES, title_split
from precision_time.tasks.publishing.drift import DriftReport
from precision_time.tasks.publishing.gate import GateDecision
from precision_time.tasks.publishing.snapshot import Snapshot
from precision_time.tasks.publishing.validate import Accuracy, Validation

__all__ = ["accuracy_rows", "readable_accuracy", "write_report"]

MOST_NAMES = 12
MOST_IMPORTANT = 15
_HOLDOUT = "held-out models"
_SHARES = {
    "MAPE": "mape",
    "median APE": "median_ape",
    "p90 APE": "p90_ape",
    "within 10 %": "within_10",
    "bias": "bias",
    "coverage": "coverage",
}


def accuracy_rows(accuracy: Accuracy) -> list[dict[str, str | float | None]]:
    """One row per split and method, with every metric as a number."""
    return [
        {"split": _HOLDOUT if split == "holdout" else title_split(split), "method": METHOD_TITLES[method], **metrics}
        for split, methods in accuracy.items()
        for method, metrics in methods.items()
    ]


def readable_accuracy(accuracy: Accuracy) -> list[dict[str, str]]:
    """One row per split and method for people: heading -> text, shares in per cent."""
    return [
        {"split": str(row["split"]), "method": str(row["method"]), "n": f"{row['n']:.0f}"}
        | {heading: "-" if row[name] is None else f"{row[name]:.1%}" for heading, name in _SHARES.items()}
        for row in accuracy_rows(accuracy)
    ]


def _rows_by_precision(by_precision: Accuracy) -> list[dict[str, str]]:
    """One row per policy and method, for people."""
    return [
        {"precision": policy, "method": METHOD_TITLES[method], "n": f"{metrics['n']:.0f}"}
        | {heading: f"{metrics[_SHARES[heading]]:.1%}" for heading in ("MAPE", "median APE")}
        for policy, methods in by_precision.items()
        for method, metrics in methods.items()
    ]


def _list(names: Iterable[str], *, noun: str) -> str:
    """The distinct names, or their number if there are many."""
    distinct = sorted(set(names))
    return f"{len(distinct)} {noun}" if len(distinct) > MOST_NAMES else ", ".join(distinct)


def _tabulate(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of a markdown table; none without rows."""
    if not rows:
        return []
    shown = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (list(rows[0]), ["---"] * len(rows[0]), *shown)]


def write_report(
    snapshot: Snapshot,
    validation: Validation,
    decision: GateDecision,
    *,
    holdout_models: tuple[str, ...],
    importances: Mapping[str, float] | None = None,
    drift: DriftReport | None = None,
    pictures: Sequence[str] = (),
) -> str:
    """The accuracy report: data, splits and precisions with baselines, intervals, important features, gate and drift.

    ``importances`` are shares of the gain by feature, largest first. ``pictures`` are lines that show plots.
    """
    rows = snapshot.training
    lines = [
        "# Accuracy of this predictor",
        "",
        f"Trained on {len(rows)} measured cells: {_list((row.network for row in rows), noun='networks')}; "
        f"{_list((row.setup.precision.name for row in rows), noun='precisions')}; "
        f"{_list((row.measurement.gpu for row in rows), noun='devices')}.",
        f"Never trained on: {', '.join(holdout_models) or 'no model was held out'}.",
        "",
        "Errors of the iteration time on rows that the method was not trained on; all methods have the same folds.",
        "",
    ]
    lines += [*_tabulate(readable_accuracy(validation.accuracy)), ""]
    if validation.by_precision:
        lines += ["The errors of 5-fold by configuration, on the rows of each precision:", ""]
        lines += [*_tabulate(_rows_by_precision(validation.by_precision)), ""]
    if validation.left_out:
        lines += ["Not scored:", ""]
        lines += [*(f"- {title_split(split)}: {reason}" for split, reason in validation.left_out.items()), ""]
    lines += pictures
    lines += [f"Intervals at {validation.level:.0%}, as a factor around the prediction:", ""]
    lines += [f"- {regime}: x{math.exp(radius):.2f}" for regime, radius in validation.radii.items()]
    if not validation.radii:
        lines.append("- none: too few rows to calibrate")
    if importances:
        lines += ["", f"Shares of the gain in all trees, the {MOST_IMPORTANT} largest:", ""]
        lines += [f"- {name}: {share:.1%}" for name, share in list(importances.items())[:MOST_IMPORTANT]]
    lines += ["", f"Gate: {'passed' if decision.passed else 'not passed'}.", ""]
    lines += [f"- {reason}" for reason in decision.reasons]
    if decision.comparisons:
        lines += [
            "",
            f"Mean absolute log errors of this predictor and of {decision.champion} on the same rows, which neither "
            "was trained on when it predicted them. Chance: how often such a difference occurs if both are equally "
            "good.",
            "",
            *_tabulate(decision.table()),
        ]
    if drift is not None:
        lines += ["", f"{drift.summary[0].upper()}{drift.summary[1:]}.", ""]
        lines += _tabulate(drift.table())
    lines += ["", "The decision as data:", "", "```json", json.dumps(decision.to_dict(), indent=1), "```"]
    if snapshot.problems:
        lines += ["", "Data that was left out:", ""]
        lines += [f"- `{path}`: {reason}" for path, reason in snapshot.problems]
    return "\n".join(lines) + "\n"
