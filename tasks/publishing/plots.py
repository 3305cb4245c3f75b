"""Plots of a campaign and of a retraining, for the reports on Prefect's pages and beside the data."""

import io
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from precision_time.predictor.answering.answers import answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor, standing_artifact
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.scoring.metrics import score
from precision_time.predictor.scoring.plots import (
    PredictedRows,
    lay_out,
    own_style,
    plot_predicted,
    render_figure,
    require_matplotlib,
)
from precision_time.predictor.scoring.scoreboard import METHOD_TITLES, title_split
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.schema import Measurement
from precision_time.tasks.publishing.champion import find_champion, trained_cells
from precision_time.tasks.publishing.validate import Validation

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CampaignPlots", "draw_campaign_plots", "draw_retraining_plots", "show_plots"]

#: The caption of each picture, also for readers who cannot see it; the figures stand in the tables of the report.
CAPTIONS = {
    "predicted.png": "Predicted against measured iteration time, one panel per precision",
    "gpus.png": "Iteration time against the number of GPUs, one line per precision",
    "speedup.png": "Speed-up of each precision over fp32, one point per cell",
    "precision.png": "Mean error of the predictor and of its baselines by precision",
}
#: More panels, or models in one legend, cannot be told apart.
MOST_PANELS = 6
MOST_MODELS = 9
_PANELS_IN_LINE = 3
_COLOURS = 64
_SPLIT = "configuration"
_BASELINES = ("predictor", "precision_blind", "roofline", "closed_form")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlots:
    """Drawn pictures by file name, and remarks to print beside them: who predicted, and what is not shown."""

    pictures: Mapping[str, bytes]
    remarks: tuple[str, ...]


def show_plots(names: Iterable[str], *, folder: str = "plots") -> list[str]:
    """Lines of markdown that show the pictures ``names`` of a folder beside the report."""
    return [line for name in names for line in (f"![{CAPTIONS.get(name, name)}]({folder}/{name})", "")]


def draw_campaign_plots(
    measurements: Sequence[Measurement],
    *,
    name: str,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
    registry: str | None = None,
) -> CampaignPlots:
    """The pictures that the cells of campaign ``name`` allow; a picture that fails becomes a remark.

    Predictions come from the champion of ``registry``, else from the default artifact, else from the closed forms. The
    cards are those the campaign wrote.
    """
    pictures: dict[str, bytes] = {}
    remarks: list[str] = []
    try:
        require_matplotlib()
        observed, left_out = _observe_each(measurements, workloads=workloads, hardware=hardware)
        if left_out:
            remarks.append(f"{left_out} cells have no card to predict from and are missing in the first picture.")
        if observed:
            pictures["predicted.png"], remark = _draw_predicted(observed, name=name, registry=registry)
            remarks.append(remark)
        for file, draw in (("gpus.png", _draw_gpus), ("speedup.png", _draw_speedup)):
            drawn, remark = draw(measurements, [()] * len(measurements))
            if drawn is not None:
                pictures[file] = drawn
            if remark:
                remarks.append(remark)
    except PrecisionTimeError as error:
        remarks.append(f"Pictures are missing: {error.what}.")
    return CampaignPlots(pictures=pictures, remarks=tuple(remarks))


def draw_retraining_plots(validation: Validation, observations: Sequence[Observation]) -> dict[str, bytes]:
    """By file name: predicted against measured of the 5-fold cross-validation, and its errors by precision.

    Where the rows allow it, also time against GPUs and speed-up over fp32, as for a campaign: of the rows of campaigns
    if there are any, else of the tables' rows. ``observations`` are those that were validated. Raises ``InputError``
    without matplotlib.
    """
    rows = PredictedRows.of_cross_validation(validation.cross_validations[_SPLIT], observations)
    shown = [row for row in observations if row.index < 0] or observations
    measurements = [row.measurement for row in shown]
    # Rows of tables know more about the setup than a measurement holds; a line runs along the number of replicas.
    setups = [(replace(row.setup.layout, data=1), row.setup.implementation) for row in shown]
    drawn = {"gpus.png": _draw_gpus(measurements, setups)[0], "speedup.png": _draw_speedup(measurements, setups)[0]}
    return {
        "predicted.png": _shrink(plot_predicted(rows)),
        "precision.png": _draw_accuracy(validation, rows.precisions),
        **{name: png for name, png in drawn.items() if png is not None},
    }


def _observe_each(
    measurements: Sequence[Measurement], *, workloads: Sequence[WorkloadFeatures], hardware: Sequence[HardwareSpec]
) -> tuple[list[Observation], int]:
    """The cells that a predictor can be asked about, and how many it cannot."""
    observed = []
    for measurement in measurements:
        try:
            observed += observe([measurement], workloads=workloads, hardware=hardware)
        except PrecisionTimeError:
            continue
    return observed, len(measurements) - len(observed)


def _find_predictor(registry: str | None, observed: Sequence[Observation]) -> tuple[PublishedPredictor | None, str]:
    """The predictor, and in words which one it is."""
    try:
        if registry is not None and (champion := find_champion(registry, "default@champion")) is not None:
            cells = {row.measurement.cell_id for row in observed} & trained_cells(registry, champion)
            trained = f", which was trained on {len(cells)} of these {len(observed)} cells" if cells else ""
            return champion, f"{champion.manifest.artifact_id}, the champion of this campaign's registry{trained}"
        published, why, _ = standing_artifact()
    except PrecisionTimeError as error:
        return None, f"no artifact can be used: {error.what}"
    return published, why if published is None else f"{published.manifest.artifact_id} ({why})"


def _draw_predicted(observed: Sequence[Observation], *, name: str, registry: str | None) -> tuple[bytes, str]:
    published, description = _find_predictor(registry, observed)
    answers = answer_queries([row.query for row in observed], published=published)
    by_closed_forms = int((~answers.by_artifact).sum())
    answered_by = "the closed forms"
    if published is None:
        remark = f"Predictions are those of {answered_by}: {description}"
    elif by_closed_forms == len(observed):
        remark = f"Predictions are those of {answered_by}: all cells are too far from the data of {description}"
    else:
        answered_by = published.manifest.artifact_id
        remark = f"Predictions are those of {description}"
        if by_closed_forms:
            remark += f"; for {by_closed_forms} cells, too far from its data, those of the closed forms"
    rows = PredictedRows(
        title=f"{name}, by {answered_by}",
        measured_s=np.array([row.measurement.iteration_time_s for row in observed]),
        predicted_s=answers.parts.iteration_time_s,
        precisions=tuple(row.setup.precision.name for row in observed),
        regimes=tuple(regime.name for regime in answers.regimes),
        steps={},
    )
    remark += f". Mean error {rows.errors.mean():.0%} of {len(observed)} cells."
    return _shrink(plot_predicted(rows)), remark


def _sort_precisions(names: Iterable[str]) -> list[str]:
    order = {name: place for place, name in enumerate(PRECISIONS)}
    return sorted(set(names), key=lambda name: (order.get(name, len(order)), name))


def _draw_gpus(measurements: Sequence[Measurement], setups: Sequence[Hashable]) -> tuple[bytes | None, str]:
    """A panel per model and batch, those with the most numbers of GPUs first; repeats count by their median.

    ``setups`` is whatever else distinguishes runs that must not be joined by a line, one entry per measurement.
    """
    panels: dict[tuple[object, ...], dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    titles = {}
    has_several_gpus = len({row.gpu for row in measurements}) > 1
    for row, setup in zip(measurements, setups, strict=True):
        options = row.option_words
        accumulated = f" x {row.gradient_accumulation_steps}" if row.gradient_accumulation_steps > 1 else ""
        batch = row.per_gpu_batch_size, row.gradient_accumulation_steps
        key = (*_identify_run(row), *batch, row.strategy, *options, setup)
        titles[key] = f"{row.gpu}\n" * has_several_gpus
        titles[key] += ", ".join([f"{row.model}, batch {row.per_gpu_batch_size}{accumulated}", *options])
        panels[key][row.precision][row.world_size].append(row.iteration_time_s)
    widths = {key: len({size for line in lines.values() for size in line}) for key, lines in panels.items()}
    scaled = sorted((key for key in panels if widths[key] > 1), key=lambda key: -widths[key])
    if not scaled:
        return None, "Time against GPUs is not drawn: no model and batch was measured on two numbers of GPUs."
    colours = {name: f"C{place}" for place, name in enumerate(_sort_precisions(row.precision for row in measurements))}
    with own_style():
        figure, axes = lay_out(len(scaled[:MOST_PANELS]), most_in_line=_PANELS_IN_LINE)
        figure.suptitle("Iteration time against the number of GPUs")
        for panel, key in zip(axes, scaled, strict=False):
            for precision in _sort_precisions(panels[key]):
                line = sorted(panels[key][precision].items())
                times_ms = [1e3 * float(np.median(seconds)) for _, seconds in line]
                panel.plot(
                    [size for size, _ in line], times_ms, "o-", markersize=3, linewidth=1,
                    color=colours[precision], label=precision,
                )  # fmt: skip
            sizes = sorted({size for line in panels[key].values() for size in line})
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.set_ylim(bottom=0.0)
            panel.set_title(titles[key], fontsize=8, parse_math=False)
            panel.set_xlabel("GPUs")
            panel.set_ylabel("ms per iteration")
            panel.grid(axis="y", color="0.9")
            panel.set_axisbelow(True)
        _add_legend(figure, axes)
        drawn = _shrink(render_figure(figure))
    left = len(scaled) - MOST_PANELS
    return drawn, f"{left} more models and batches are in the table only." if left > 0 else ""


def _identify_run(row: Measurement) -> tuple[object, ...]:
    """Source, code, network and device of a measurement."""
    return (row.source, row.framework, row.model, row.task_input, row.gpu)


def _draw_speedup(measurements: Sequence[Measurement], setups: Sequence[Hashable]) -> tuple[bytes | None, str]:
    """A point per cell that was also measured in fp32, repeats by their median; ``setups`` as in ``_draw_gpus``."""
    runs: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    models_of = {}
    for row, setup in zip(measurements, setups, strict=True):
        sizes = row.world_size, row.nodes, row.per_gpu_batch_size, row.gradient_accumulation_steps
        key = (*_identify_run(row), *sizes, row.strategy, *row.option_words, setup)
        runs[key][row.precision].append(row.iteration_time_s)
        models_of[key] = row.model
    ratios: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for key, times in runs.items():
        for precision in times.keys() - {"fp32"} if "fp32" in times else ():
            ratio = float(np.median(times["fp32"]) / np.median(times[precision]))
            ratios[precision].append((models_of[key], ratio))
    if not ratios:
        return None, "Speed-up is not drawn: no cell was measured in fp32 and in another precision."
    counts = Counter(model for points in ratios.values() for model, _ in points)
    named = sorted(sorted(counts, key=lambda model: -counts[model])[:MOST_MODELS])
    left = len(counts) - len(named)
    models = [*named, *([f"{left} others"] if left else [])]
    with own_style():
        figure, (axes,) = lay_out(1, most_in_line=1)
        figure.set_size_inches(5.5, 3.6)
        figure.suptitle("Speed-up over fp32")
        precisions = _sort_precisions(ratios)
        for place, precision in enumerate(precisions):
            axes.hlines(
                float(np.median([ratio for _, ratio in ratios[precision]])), place - 0.3, place + 0.3, color="0.4",
                linewidth=1.2, label="median" if place == 0 else "",
            )  # fmt: skip
        for number, model in enumerate(models):
            points = [
                (place + 0.5 * ((number + 0.5) / len(models) - 0.5), ratio)
                for place, precision in enumerate(precisions)
                for model_of_point, ratio in ratios[precision]
                if (model_of_point if model_of_point in named else models[-1]) == model
            ]
            axes.scatter(
                [place for place, _ in points], [ratio for _, ratio in points], s=14, alpha=0.7, linewidths=0,
                color=f"C{number}", label=model,
            )  # fmt: skip
        axes.axhline(1.0, color="0.7", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(precisions)), [f"{name} ({len(ratios[name])})" for name in precisions])
        axes.set_xlim(-0.6, len(precisions) - 0.4)
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("times as fast as fp32")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
        return _shrink(render_figure(figure)), ""


def _draw_accuracy(validation: Validation, precisions: Sequence[str]) -> bytes:
    """MAPE by precision of every method that was cross-validated on the same rows."""
    result = validation.cross_validations[_SPLIT]
    precision_of_row = np.array(precisions)
    policies = _sort_precisions(precisions)
    methods = [method for method in _BASELINES if method in result.predicted_s]
    with own_style():
        figure, (axes,) = lay_out(1, most_in_line=1)
        figure.set_size_inches(1.6 + 0.9 * max(3, len(policies)), 3.6)
        figure.suptitle(f"Error by precision: {title_split(_SPLIT)}", parse_math=False)
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            errors = [
                100 * (score(result.predicted_s[method][rows], result.measured_s[rows])["mape"] or 0.0)
                for rows in (precision_of_row == policy for policy in policies)
            ]
            places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(policies))]
            axes.bar(places, errors, width=0.9 * width, color=f"C{number}", label=METHOD_TITLES[method])
        counts = [(precision_of_row == policy).sum() for policy in policies]
        labels = [f"{policy}\n({count:,})" for policy, count in zip(policies, counts, strict=True)]
        axes.set_xticks(range(len(policies)), labels)
        axes.set_ylabel("MAPE (% of measured)")
        axes.set_xlabel("precision (rows)")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        _add_legend(figure, [axes])
        return _shrink(render_figure(figure))


def _add_legend(figure: "Figure", panels: Sequence["Axes"]) -> None:
    """One legend for all panels, below them."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )


def _shrink(png: bytes) -> bytes:
    """The same picture with a palette: a quarter of the bytes, because a page of Prefect holds all of its pictures."""
    from PIL import Image

    data = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        # MAXCOVERAGE keeps the colours of a few points on a white ground; the default turns them grey.
        palette = picture.convert("RGB").quantize(_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(data, format="PNG", optimize=True)
    return data.getvalue()
