"""Plots of accuracy: predicted against measured by precision, and errors by distance from the training data."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.domain import TrainingDomain
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.learning.splits import SPLITS
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import SPEED_UP, CrossValidation
from precision_time.predictor.scoring.evaluate_tables import PredictedTable
from precision_time.predictor.scoring.scoreboard import title_split
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.storage.errors import InputError, PrecisionTimeError
from precision_time.storage.filesystem import open_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PredictedRows", "check_plots", "draw_cross_validation", "draw_table", "lay_out", "own_style",
    "plot_distance", "plot_predicted", "render_figure", "require_matplotlib", "write_plots",
]  # fmt: skip

Floats = npt.NDArray[np.float64]

#: The band around the diagonal, as a share of the measured time.
_BAND = 0.25
#: Smaller errors (per cent) are drawn here: the axis is logarithmic.
_SMALLEST_ERROR = 0.1
_LEGEND = "MAPE (boxes: the middle half of the rows, whiskers: 90 % of them)"
_PANELS_IN_LINE = 3
_MANY_POINTS = 200
#: More points of a panel cover each other and make a large file; hexagons, this many from side to side, do not.
_MOST_POINTS, _HEXAGONS_ACROSS = 1000, 60
_INCHES = 3.3
_DOTS_PER_INCH = 110
#: Upper ends of the bins of a distance in doublings: none, then each factor of 2 up to 8, then farther.
_DOUBLINGS = (0.0, 1.0, 2.0, 3.0)
_BINS = ("in the data", "up to 2x", "up to 4x", "up to 8x", "farther", "never seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRows:
    """The rows of a plot: predicted and measured seconds, and the distance of each row from the training data.

    Arrays have shape (rows,). ``precisions`` are names of policies and ``regimes`` those of ``REGIMES``. ``steps`` maps
    the label of an axis to distances in doublings (1: a factor of 2 from the nearest): 0 in the data, infinite where
    the data has nothing to compare with. In a plot of speed-ups both times are ratios (``unit`` empty).
    """

    title: str
    measured_s: Floats
    predicted_s: Floats
    precisions: tuple[str, ...]
    regimes: tuple[str, ...]
    steps: Mapping[str, Floats]
    unit: str = "s"

    def __post_init__(self) -> None:
        shape = np.shape(self.measured_s)
        sizes = [len(self.precisions), len(self.regimes), *(len(values) for values in self.steps.values())]
        if len(shape) != 1 or np.shape(self.predicted_s) != shape or any(size != shape[0] for size in sizes):
            raise InputError(
                "the rows of a plot do not match",
                got=f"measured {shape}, predicted {np.shape(self.predicted_s)}, others {sizes}",
                expected="one entry a row in each",
            )
        both = np.concatenate([self.measured_s, self.predicted_s])
        if not shape[0] or not (np.isfinite(both) & (both > 0)).all():
            raise InputError("nothing to draw", got=f"{shape[0]} rows", expected="rows with positive finite times")

    @property
    def errors(self) -> Floats:
        """Absolute error of each row as a fraction of the measured time."""
        errors: Floats = np.abs(self.predicted_s - self.measured_s) / self.measured_s
        return errors

    @classmethod
    def of_cross_validation(cls, result: CrossValidation, observations: Sequence[Observation]) -> "PredictedRows":
        """The predicted rows of a split; distances are to the training rows of the fold of each row.

        ``observations`` are those that were cross-validated.
        """
        is_ratio = result.split == SPEED_UP
        return cls(
            title=title_split(result.split),
            measured_s=result.measured_s,
            predicted_s=result.predicted_s["predictor"],
            precisions=tuple(observations[row].setup.precision.name for row in result.rows),
            regimes=tuple(result.regimes),
            steps={} if is_ratio else _distances_to_training_rows(result, observations),
            unit="" if is_ratio else "s",
        )

    @classmethod
    def of_table(cls, table: PredictedTable, *, title: str, domain: TrainingDomain | None = None) -> "PredictedRows":
        """The rows of an evaluated table; distances are to the ``domain`` of the artifact that answered."""
        frame = table.frame
        return cls(
            title=title,
            measured_s=table.measured_s,
            predicted_s=table.predicted_s,
            precisions=tuple(map(str, frame["policy"])),
            regimes=tuple(map(str, frame["regime"])),
            steps={}
            if domain is None
            else _distances_to_domain(
                list(map(str, frame["network"])),
                frame["per_gpu_batch_size"].to_numpy(np.float64),
                frame["world_size"].to_numpy(np.float64),
                domain,
            ),
        )


def _nearest_steps(sizes: Floats, trained: Floats) -> Floats:
    """Doublings from each size to the nearest one in ``trained``; infinite where that is empty."""
    if not len(trained):
        return np.full(len(sizes), np.inf)
    steps: Floats = np.abs(np.log2(sizes)[:, None] - np.unique(np.log2(trained))).min(axis=1)
    return steps


def _distances_to_training_rows(result: CrossValidation, observations: Sequence[Observation]) -> dict[str, Floats]:
    """Doublings to the nearest batch, and GPU count, at which the fold was trained on the network of the row."""
    networks = np.array([observation.network for observation in observations])
    sizes_by_label = {
        "from the nearest batch of the network": np.array(
            [observation.setup.batch_size for observation in observations], dtype=np.float64
        ),
        "from the nearest GPU count of the network": np.array(
            [observation.setup.world_size for observation in observations], dtype=np.float64
        ),
    }
    steps = {label: np.empty(len(result.rows)) for label in sizes_by_label}
    for fold in np.unique(result.folds):
        inside = np.flatnonzero(result.folds == fold)
        train = _find_training_rows(result, int(fold), observations)
        for network in np.unique(networks[result.rows[inside]]):
            places = inside[networks[result.rows[inside]] == network]
            same_network = train[networks[train] == network]
            for label, sizes in sizes_by_label.items():
                steps[label][places] = _nearest_steps(sizes[result.rows[places]], sizes[same_network])
    return steps


def _find_training_rows(
    result: CrossValidation, fold: int, observations: Sequence[Observation]
) -> npt.NDArray[np.int64]:
    others = result.rows[result.folds != fold]
    # Several folds predict every row once, from all others. A single fold does not contain its training rows.
    return others if len(others) else SPLITS[result.split].divide(observations, seed=0)[0].train


def _distances_to_domain(
    networks: Sequence[str], batches: Floats, worlds: Floats, domain: TrainingDomain
) -> dict[str, Floats]:
    def outside(network: str, batch: float) -> float:
        if network not in domain.batch_sizes:
            return math.inf
        low, high = domain.batch_sizes[network]
        return max(0.0, math.log2(low / batch), math.log2(batch / high))

    return {
        "from the measured batches of the network": np.array(
            [outside(*pair) for pair in zip(networks, batches, strict=True)]
        ),
        "from the most GPUs measured": np.log2(np.maximum(worlds / domain.max_world_size, 1.0)),
    }


def check_plots(folder: str) -> None:
    """Check, before the work whose result they show, that plots can be drawn and written into ``folder``.

    Raises ``InputError`` without matplotlib, and what the store raises for a folder that cannot be written.
    """
    require_matplotlib()
    open_store(folder).check_writable()


def require_matplotlib() -> None:
    """Raise ``InputError`` without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InputError(
            "plots need matplotlib",
            got=str(error),
            expected="an installation with the extra campaign",
            fix="pip install 'precision-time[campaign]'",
        ) from error


@contextmanager
def own_style() -> Iterator[None]:
    """Settings independent of the user's, so that a plot depends on its data alone."""
    import matplotlib

    # Not pyplot, which would choose a backend and keep figures. The font is the one that comes with matplotlib.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.family": ["DejaVu Sans"], "font.size": 8})
        yield


def render_figure(figure: "Figure") -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    data = io.BytesIO()
    # Without the version, so that the same data gives the same bytes.
    figure.savefig(data, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return data.getvalue()


def lay_out(count: int, *, most_in_line: int) -> "tuple[Figure, list[Axes]]":
    """A figure of ``count`` panels, at most ``most_in_line`` of them side by side."""
    from matplotlib.figure import Figure

    columns = min(count, most_in_line)
    lines = -(-count // columns)
    figure = Figure(figsize=(_INCHES * columns, _INCHES * lines + 0.4), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in axes[count:]:
        figure.delaxes(spare)
    return figure, axes[:count]


def plot_predicted(rows: PredictedRows) -> bytes:
    """Predicted against measured, one panel a precision policy, on logarithmic axes.

    Each panel shows the diagonal, a band of 25 % around it, and in its title the number of rows and the MAPE. Raises
    ``InputError`` without matplotlib.
    """
    require_matplotlib()
    from matplotlib.ticker import LogLocator

    with own_style():
        order = {name: place for place, name in enumerate(PRECISIONS)}
        policies = sorted(set(rows.precisions), key=lambda name: (order.get(name, len(order)), name))
        figure, panels = lay_out(len(policies), most_in_line=_PANELS_IN_LINE)
        figure.suptitle(f"Predicted against measured: {rows.title}", parse_math=False)
        precisions = np.array(rows.precisions)
        unit = f" ({rows.unit} a step)" if rows.unit else " speed-up"
        for axes, policy in zip(panels, policies, strict=True):
            inside = precisions == policy
            both = np.concatenate([rows.measured_s[inside], rows.predicted_s[inside]])
            limits = np.array([both.min() / 1.5, both.max() * 1.5])
            axes.fill_between(
                limits, limits * (1 - _BAND), limits * (1 + _BAND), color="0.85", linewidth=0, label="within 25 %"
            )
            axes.plot(limits, limits, color="0.4", linewidth=0.8)
            _draw_points(axes, rows.measured_s[inside], rows.predicted_s[inside], limits=limits)
            axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
            for axis in (axes.xaxis, axes.yaxis):
                # few labels over many decades, enough over less than one
                axis.set_major_locator(LogLocator(subs=(1.0,) if limits[1] > 100 * limits[0] else (1.0, 2.0, 5.0)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("")
            axes.set_xlabel(f"measured{unit}")
            axes.set_ylabel(f"predicted{unit}")
            axes.set_title(f"{policy}: {inside.sum()} rows, MAPE {100 * rows.errors[inside].mean():.1f} %", fontsize=8)
        panels[0].legend(loc="upper left", frameon=False)
        return render_figure(figure)


def _draw_points(axes: "Axes", measured: Floats, predicted: Floats, *, limits: Floats) -> None:
    """A point a row; where there are too many, hexagons, darker with more rows (white: less than one)."""
    if len(measured) > _MOST_POINTS:
        axes.hexbin(
            measured, predicted, xscale="log", yscale="log", extent=(*np.log10(limits), *np.log10(limits)),
            gridsize=_HEXAGONS_ACROSS, mincnt=1, bins="log", vmin=0.05, cmap="Blues", linewidths=0, rasterized=True,
        )  # fmt: skip
        return
    # few points are large enough to see, and hundreds small enough not to cover each other
    size, alpha = (5, 0.35) if len(measured) > _MANY_POINTS else (18, 0.8)
    axes.scatter(measured, predicted, s=size, alpha=alpha, linewidths=0, color="C0", rasterized=True)


def plot_distance(rows: PredictedRows) -> bytes:
    """Absolute errors by distance from the training data: a panel by regime, and one for each of the ``steps``.

    A box reaches from the 25th to the 75th percentile of the errors of its rows, with the median as a line and
    whiskers to the 5th and 95th percentile; a diamond is the MAPE. Raises ``InputError`` without matplotlib.
    """
    require_matplotlib()
    with own_style():
        groups = {"regime": _group_regimes(rows.regimes)}
        groups |= {name: _group_steps(steps) for name, steps in rows.steps.items()}
        figure, panels = lay_out(len(groups), most_in_line=len(groups))
        figure.suptitle(f"Errors by distance from the training data: {rows.title}", parse_math=False)
        errors = np.maximum(100 * rows.errors, _SMALLEST_ERROR)
        for axes, (name, places) in zip(panels, groups.items(), strict=True):
            _draw_boxes(axes, {label: errors[inside] for label, inside in places.items()})
            axes.set_xlabel(name)
            axes.sharey(panels[0])
        panels[0].set_ylabel("absolute error (% of measured)")
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter("{x:g}")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", frameon=False)
        return render_figure(figure)


def _group_regimes(regimes: Sequence[str]) -> dict[str, npt.NDArray[np.bool_]]:
    labels = np.array(regimes)
    order = [*REGIMES, *sorted(set(regimes) - set(REGIMES))]
    return {name or "none": labels == name for name in order if (labels == name).any()}


def _group_steps(steps: Floats) -> dict[str, npt.NDArray[np.bool_]]:
    # A size that is equal up to the rounding of its logarithm is in the data.
    bins = np.searchsorted(np.array(_DOUBLINGS) + 1e-9, steps)
    bins[np.isinf(steps)] = len(_BINS) - 1
    return {label: bins == place for place, label in enumerate(_BINS) if (bins == place).any()}


def _draw_boxes(axes: "Axes", groups: Mapping[str, Floats]) -> None:
    places = np.arange(len(groups), dtype=np.float64)
    shares = (0.05, 0.25, 0.5, 0.75, 0.95)
    names = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(names, np.quantile(errors, shares), strict=True)) for errors in groups.values()]
    axes.bxp(boxes, positions=places, widths=0.6, showfliers=False)
    axes.plot(places, [errors.mean() for errors in groups.values()], "D", color="C1", markersize=4, label=_LEGEND)
    labels = [f"{label} ({len(errors)})" for label, errors in groups.items()]
    axes.set_xticks(places, labels, rotation=30, ha="right")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)


def draw_cross_validation(
    results: Mapping[str, CrossValidation], observations: Sequence[Observation]
) -> dict[str, bytes]:
    """Both plots of every split by file name (``row-predicted.png``, ``row-distance.png``); speed-ups have only one.

    Results that score a part of a split's rows (without contests) are left out.
    """
    plots = {}
    for split, result in results.items():
        if split != SPEED_UP and split not in SPLITS:
            continue
        rows = PredictedRows.of_cross_validation(result, observations)
        plots[f"{split}-predicted.png"] = plot_predicted(rows)
        if split != SPEED_UP:
            plots[f"{split}-distance.png"] = plot_distance(rows)
    return plots


def draw_table(table: PredictedTable, *, title: str, domain: TrainingDomain | None = None) -> dict[str, bytes]:
    """``predicted.png`` and ``distance.png`` of an evaluated table."""
    rows = PredictedRows.of_table(table, title=title, domain=domain)
    return {"predicted.png": plot_predicted(rows), "distance.png": plot_distance(rows)}


def write_plots(plots: Mapping[str, bytes], folder: str) -> tuple[str, ...]:
    """Write plots, by file name, into ``folder`` and return their paths: all of them, or none after an error.

    Files of the same names are replaced, and restored when a later one cannot be written. Raises what the store
    raises.
    """
    store = open_store(folder)
    earlier = {name: store.read_bytes(name) for name in plots if store.exists(name)}
    written: list[str] = []
    try:
        for name, data in sorted(plots.items()):
            store.write_bytes(name, data)
            written.append(name)
    except PrecisionTimeError:
        for name in written:
            if name in earlier:
                store.write_bytes(name, earlier[name])
            else:
                store.remove(name)
        raise
    return tuple(f"{store.url.rstrip('/')}/{name}" for name in written)
