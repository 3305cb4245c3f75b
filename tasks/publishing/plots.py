"""Pictures of a campaign and of a retraining, as the reports show them on Prefect's pages and beside the data."""

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
from precision_time.tasks.publishing.publish import find_champion, trained_cells
from precision_time.tasks.publishing.validate import Validation

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["CampaignPlots", "draw_campaign_plots", "draw_retraining_plots", "show_plots"]

#: What each picture shows, in words for whoever cannot see it; the figures stand in the tables of the report.
SHOWN = {
    "predicted.png": "Predicted against measured iteration time, a panel a precision",
    "gpus.png": "Iteration time against the number of GPUs, a line a precision",
    "speedup.png": "Speed-up of each precision over fp32, a point a cell",
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
    """Drawn pictures by file name, and what must be said beside them: who predicted, and what is not shown."""

    pictures: Mapping[str, bytes]
    remarks: tuple[str, ...]


def show_plots(names: Iterable[str], *, folder: str = "plots") -> list[str]:
    """Lines of markdown that show the pictures ``names`` of a folder beside the report."""
    return [line for name in names for line in (f"![{SHOWN.get(name, name)}]({folder}/{name})", "")]


def draw_campaign_plots(
    measurements: Sequence[Measurement],
    *,
    name: str,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
    registry: str | None = None,
) -> CampaignPlots:
    """The pictures of the cells of campaign ``name``, as far as they support them; none stops a campaign.

    Predictions are those of the champion of ``registry``, else of whatever answers without being named, else of the
    closed forms. The cards are those the campaign wrote.
    """
    pictures: dict[str, bytes] = {}
    remarks: list[str] = []
    try:
        require_matplotlib()
        observed, left_out = _observe_each(measurements, workloads=workloads, hardware=hardware)
        if left_out:
            remarks.append(f"{left_out} cells have no card to predict from and are not in the first picture.")
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
    """Predicted against measured of the 5-fold cross-validation, and its errors by precision, by file name.

    Beside them, where the rows support them, what a campaign shows of itself: time against GPUs and speed-up over fp32,
    of the rows of campaigns where there are any, else of the tables'. ``observations`` are those that were validated.
    Raises ``InputError`` without matplotlib.
    """
    rows = PredictedRows.of_cross_validation(validation.cross_validations[_SPLIT], observations)
    own = [seen for seen in observations if seen.index < 0] or observations
    measurements = [seen.measurement for seen in own]
    # Rows of tables say more of what was run than a measurement holds; replicas are what a line goes along.
    apart = [(replace(seen.setup.layout, data=1), seen.setup.implementation) for seen in own]
    drawn = {"gpus.png": _draw_gpus(measurements, apart)[0], "speedup.png": _draw_speedup(measurements, apart)[0]}
    return {
        "predicted.png": _shrink(plot_predicted(rows)),
        "precision.png": _draw_accuracy(validation, rows.precisions),
        **{name: png for name, png in drawn.items() if png is not None},
    }


def _observe_each(
    measurements: Sequence[Measurement], *, workloads: Sequence[WorkloadFeatures], hardware: Sequence[HardwareSpec]
) -> tuple[list[Observation], int]:
    """What can be asked of a predictor, and how many cells cannot."""
    observed = []
    for measured in measurements:
        try:
            observed += observe([measured], workloads=workloads, hardware=hardware)
        except PrecisionTimeError:
            continue
    return observed, len(measurements) - len(observed)


def _find_predictor(registry: str | None, observed: Sequence[Observation]) -> tuple[PublishedPredictor | None, str]:
    """What predicts, and in words which it is."""
    try:
        if registry is not None and (champion := find_champion(registry, "default@champion")) is not None:
            cells = {seen.measurement.cell_id for seen in observed} & trained_cells(registry, champion)
            learned = f", which has learned from {len(cells)} of these {len(observed)} cells" if cells else ""
            return champion, f"{champion.manifest.artifact_id}, the champion of this campaign's registry{learned}"
        published, why = standing_artifact()
    except PrecisionTimeError as error:
        return None, f"no artifact can be used: {error.what}"
    return published, why if published is None else f"{published.manifest.artifact_id} ({why})"


def _draw_predicted(observed: Sequence[Observation], *, name: str, registry: str | None) -> tuple[bytes, str]:
    published, known_as = _find_predictor(registry, observed)
    answers = answer_queries([seen.query for seen in observed], published=published)
    alone = int((~answers.by_artifact).sum())
    answered_by = "the closed forms"
    if published is None:
        remark = f"Predictions are those of {answered_by}: {known_as}"
    elif alone == len(observed):
        remark = f"Predictions are those of {answered_by}: all of these cells are too far from the data of {known_as}"
    else:
        answered_by = published.manifest.artifact_id
        remark = f"Predictions are those of {known_as}"
        if alone:
            remark += f"; for {alone} cells, too far from its data, those of the closed forms"
    rows = PredictedRows(
        title=f"{name}, by {answered_by}",
        measured_s=np.array([seen.measurement.iteration_time_s for seen in observed]),
        predicted_s=answers.parts.iteration_time_s,
        precisions=tuple(seen.setup.precision.name for seen in observed),
        regimes=answers.regimes,
        steps={},
    )
    remark += f". Mean error {rows.errors.mean():.0%} of {len(observed)} cells."
    return _shrink(plot_predicted(rows)), remark


def _by_precision(names: Iterable[str]) -> list[str]:
    order = {name: place for place, name in enumerate(PRECISIONS)}
    return sorted(set(names), key=lambda name: (order.get(name, len(order)), name))


def _draw_gpus(measurements: Sequence[Measurement], apart: Sequence[Hashable]) -> tuple[bytes | None, str]:
    """Panels of one model and batch each, those with the most numbers of GPUs first; repeats count by their median.

    ``apart`` is what else tells the runs apart that no line may join, one entry a measurement.
    """
    panels: dict[tuple[object, ...], dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    titles = {}
    several = len({seen.gpu for seen in measurements}) > 1
    for seen, others in zip(measurements, apart, strict=True):
        options = seen.option_words
        accumulated = f" x {seen.gradient_accumulation_steps}" if seen.gradient_accumulation_steps > 1 else ""
        batch = seen.per_gpu_batch_size, seen.gradient_accumulation_steps
        key = (*_machine(seen), *batch, seen.strategy, *options, others)
        titles[key] = f"{seen.gpu}\n" * several
        titles[key] += ", ".join([f"{seen.model}, batch {seen.per_gpu_batch_size}{accumulated}", *options])
        panels[key][seen.precision][seen.world_size].append(seen.iteration_time_s)
    widths = {key: len({size for line in lines.values() for size in line}) for key, lines in panels.items()}
    scaled = sorted((key for key in panels if widths[key] > 1), key=lambda key: -widths[key])
    if not scaled:
        return None, "Time against GPUs is not drawn: no model and batch was measured on two numbers of GPUs."
    colours = {name: f"C{place}" for place, name in enumerate(_by_precision(seen.precision for seen in measurements))}
    with own_style():
        figure, axes = lay_out(len(scaled[:MOST_PANELS]), most_in_line=_PANELS_IN_LINE)
        figure.suptitle("Iteration time against the number of GPUs")
        for own, key in zip(axes, scaled, strict=False):
            for precision in _by_precision(panels[key]):
                line = sorted(panels[key][precision].items())
                times_ms = [1e3 * float(np.median(seconds)) for _, seconds in line]
                own.plot(
                    [size for size, _ in line], times_ms, "o-", markersize=3, linewidth=1,
                    color=colours[precision], label=precision,
                )  # fmt: skip
            sizes = sorted({size for line in panels[key].values() for size in line})
            own.set_xscale("log", base=2)
            own.set_xticks(sizes, [str(size) for size in sizes])
            own.minorticks_off()
            own.set_ylim(bottom=0.0)
            own.set_title(titles[key], fontsize=8, parse_math=False)
            own.set_xlabel("GPUs")
            own.set_ylabel("ms an iteration")
            own.grid(axis="y", color="0.9")
            own.set_axisbelow(True)
        _add_legend(figure, axes)
        drawn = _shrink(render_figure(figure, "png"))
    left = len(scaled) - MOST_PANELS
    return drawn, f"{left} more models and batches are in the table only." if left > 0 else ""


def _machine(seen: Measurement) -> tuple[object, ...]:
    """What ran on what, as one source tells it."""
    return (seen.source, seen.framework, seen.model, seen.task_input, seen.gpu)


def _draw_speedup(measurements: Sequence[Measurement], apart: Sequence[Hashable]) -> tuple[bytes | None, str]:
    """A point a cell that was measured in fp32 too, repeats by their median; ``apart`` as in ``_draw_gpus``."""
    runs: dict[tuple[object, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    models_of = {}
    for seen, others in zip(measurements, apart, strict=True):
        sizes = seen.world_size, seen.nodes, seen.per_gpu_batch_size, seen.gradient_accumulation_steps
        key = (*_machine(seen), *sizes, seen.strategy, *seen.option_words, others)
        runs[key][seen.precision].append(seen.iteration_time_s)
        models_of[key] = seen.model
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for key, times in runs.items():
        for precision in times.keys() - {"fp32"} if "fp32" in times else ():
            ratio = float(np.median(times["fp32"]) / np.median(times[precision]))
            found[precision].append((models_of[key], ratio))
    if not found:
        return None, "Speed-up is not drawn: no cell was measured in fp32 and in another precision."
    counts = Counter(model for points in found.values() for model, _ in points)
    named = sorted(sorted(counts, key=lambda model: -counts[model])[:MOST_MODELS])
    left = len(counts) - len(named)
    models = [*named, *([f"{left} others"] if left else [])]
    with own_style():
        figure, (axes,) = lay_out(1, most_in_line=1)
        figure.set_size_inches(5.5, 3.6)
        figure.suptitle("Speed-up over fp32")
        precisions = _by_precision(found)
        for place, precision in enumerate(precisions):
            axes.hlines(
                float(np.median([ratio for _, ratio in found[precision]])), place - 0.3, place + 0.3, color="0.4",
                linewidth=1.2, label="median" if place == 0 else "",
            )  # fmt: skip
        for number, model in enumerate(models):
            points = [
                (place + 0.5 * ((number + 0.5) / len(models) - 0.5), ratio)
                for place, precision in enumerate(precisions)
                for own, ratio in found[precision]
                if (own if own in named else models[-1]) == model
            ]
            axes.scatter(
                [place for place, _ in points], [ratio for _, ratio in points], s=14, alpha=0.7, linewidths=0,
                color=f"C{number}", label=model,
            )  # fmt: skip
        axes.axhline(1.0, color="0.7", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(precisions)), [f"{name} ({len(found[name])})" for name in precisions])
        axes.set_xlim(-0.6, len(precisions) - 0.4)
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("times as fast as fp32")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
        return _shrink(render_figure(figure, "png")), ""


def _draw_accuracy(validation: Validation, precisions: Sequence[str]) -> bytes:
    """MAPE by precision of every method that was cross-validated on the same rows."""
    result = validation.cross_validations[_SPLIT]
    chosen = np.array(precisions)
    policies = _by_precision(precisions)
    methods = [method for method in _BASELINES if method in result.predicted_s]
    with own_style():
        figure, (axes,) = lay_out(1, most_in_line=1)
        figure.set_size_inches(1.6 + 0.9 * max(3, len(policies)), 3.6)
        figure.suptitle(f"Error by precision: {title_split(_SPLIT)}", parse_math=False)
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            errors = [
                100 * (score(result.predicted_s[method][own], result.measured_s[own])["mape"] or 0.0)
                for own in (chosen == policy for policy in policies)
            ]
            places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(policies))]
            axes.bar(places, errors, width=0.9 * width, color=f"C{number}", label=METHOD_TITLES[method])
        axes.set_xticks(range(len(policies)), [f"{policy}\n({(chosen == policy).sum():,})" for policy in policies])
        axes.set_ylabel("MAPE (% of measured)")
        axes.set_xlabel("precision (rows)")
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        _add_legend(figure, [axes])
        return _shrink(render_figure(figure, "png"))


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
    """The same picture with a palette: a quarter of the bytes, since a page of Prefect holds all of its pictures."""
    from PIL import Image

    data = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        # Coverage keeps the colour of a few points among all of the white; the usual choice turns them grey.
        palette = picture.convert("RGB").quantize(_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(data, format="PNG", optimize=True)
    return data.getvalue()
