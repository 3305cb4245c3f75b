"""Pictures of accuracy: predicted against measured by precision, and errors by distance from the training data."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
    "plot_distance", "plot_predicted", "plot_table", "render_figure", "require_matplotlib",
    "write_plots",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Form = Literal["png", "svg"]

#: The band around the diagonal, as a share of the measured time.
_BAND = 0.25
#: Smaller errors (per cent) are drawn here: the axis is logarithmic.
_SMALLEST_ERROR = 0.1
_LEGEND = "MAPE (boxes: the middle half of the rows, whiskers: 90 % of them)"
_PANELS_IN_LINE = 3
_MANY_POINTS = 200
#: More points of a panel cover each other and weigh too much for a page; so many hexagons from side to side do not.
_MOST_POINTS, _HEXAGONS_ACROSS = 1000, 60
_INCHES = 3.3
_DOTS_PER_INCH = 110
#: Upper ends of the bins of a distance in doublings: the same, then each factor of 2 up to 8, then farther.
_DOUBLINGS = (0.0, 1.0, 2.0, 3.0)
_BINS = ("in the data", "up to 2x", "up to 4x", "up to 8x", "farther", "never seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRows:
    """What a picture shows: predicted and measured seconds, and how far each row was from what taught.

    Arrays have shape (rows,). ``precisions`` are names of policies and ``regimes`` those of ``REGIMES``. ``steps``
    maps what is measured along an axis to distances in doublings (1: a factor of 2 from the nearest): 0 in the data,
    infinite where the data has nothing to measure from. In a picture of speed-ups both times are ratios (``unit``
    empty).
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
                "the rows of a picture do not match",
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
        """The predictor's rows of a split; distances are to the rows that taught the fold of each.

        ``observations`` are those that were cross-validated.
        """
        seen = [observations[row] for row in result.rows]
        is_ratio = result.split == SPEED_UP
        return cls(
            title=title_split(result.split),
            measured_s=result.measured_s,
            predicted_s=result.predicted_s["predictor"],
            precisions=tuple(one.setup.precision.name for one in seen),
            regimes=tuple(result.regimes),
            steps={} if is_ratio else _distances_to_teachers(result, observations),
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


def _nearest_steps(asked: Floats, taught: Floats) -> Floats:
    """Doublings from each asked size to the nearest taught one; infinite without any."""
    if not len(taught):
        return np.full(len(asked), np.inf)
    known = np.unique(np.log2(taught))
    wanted = np.log2(asked)
    place = np.searchsorted(known, wanted).clip(1, len(known) - 1) if len(known) > 1 else np.zeros(len(wanted), int)
    steps: Floats = np.minimum(np.abs(wanted - known[place]), np.abs(wanted - known[place - 1]))
    return steps


def _distances_to_teachers(result: CrossValidation, observations: Sequence[Observation]) -> dict[str, Floats]:
    """Doublings to the nearest batch, and world, at which the fold's teaching rows have the same network."""
    networks = np.array([seen.network for seen in observations])
    batches = np.array([seen.setup.batch_size for seen in observations], dtype=np.float64)
    worlds = np.array([seen.setup.world_size for seen in observations], dtype=np.float64)
    found = {
        "from the nearest batch taught of the network": batches,
        "from the nearest GPU count of the network": worlds,
    }
    steps = {name: np.empty(len(result.rows)) for name in found}
    for fold in np.unique(result.folds):
        asked = np.flatnonzero(result.folds == fold)
        teaches = _find_teachers(result, int(fold), observations)
        for network in np.unique(networks[result.rows[asked]]):
            own = asked[networks[result.rows[asked]] == network]
            taught = teaches[networks[teaches] == network]
            for name, sizes in found.items():
                steps[name][own] = _nearest_steps(sizes[result.rows[own]], sizes[taught])
    return steps


def _find_teachers(result: CrossValidation, fold: int, observations: Sequence[Observation]) -> npt.NDArray[np.int64]:
    teaches = result.rows[result.folds != fold]
    # Where there are folds, every row is predicted once, from all others; one alone says nothing of its teachers.
    return teaches if len(teaches) else SPLITS[result.split].divide(observations, seed=0)[0].train


def _distances_to_domain(
    networks: Sequence[str], batches: Floats, worlds: Floats, domain: TrainingDomain
) -> dict[str, Floats]:
    def outside(network: str, batch: float) -> float:
        if network not in domain.batch_sizes:
            return math.inf
        low, high = domain.batch_sizes[network]
        return max(0.0, math.log2(low / batch), math.log2(batch / high))

    return {
        "from the batches measured of the network": np.array(
            [outside(*pair) for pair in zip(networks, batches, strict=True)]
        ),
        "from the most GPUs measured": np.log2(np.maximum(worlds / domain.max_world_size, 1.0)),
    }


def check_plots(folder: str) -> None:
    """Whether pictures can be drawn and put into ``folder``: to be asked before the work whose result they show.

    Raises ``InputError`` without matplotlib, and what the store raises for a place that cannot be written.
    """
    require_matplotlib()
    open_store(folder).check_writable()


def require_matplotlib() -> None:
    """Raise ``InputError`` where nothing can be drawn."""
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
    """Settings that are not the user's, so that a picture depends on its data alone."""
    import matplotlib

    # Not pyplot: it would choose a backend and keep figures; and text stays in the font that comes with matplotlib.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"font.family": ["DejaVu Sans"], "font.size": 8, "svg.hashsalt": "precision-time", "svg.fonttype": "path"}
        )
        yield


def render_figure(figure: "Figure", form: Form) -> bytes:
    """The picture's file; equal figures give equal bytes. Raises ``InputError`` for another form than png or svg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if form not in ("png", "svg"):
        raise InputError("no such form of a picture", got=form, expected="png or svg")
    FigureCanvasAgg(figure)
    data = io.BytesIO()
    # Neither version nor date, so that the same data gives the same bytes.
    metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
    figure.savefig(data, format=form, dpi=_DOTS_PER_INCH, metadata=metadata)
    return data.getvalue()


def lay_out(count: int, *, most_in_line: int) -> "tuple[Figure, list[Axes]]":
    """A figure of ``count`` panels."""
    from matplotlib.figure import Figure

    columns = min(count, most_in_line)
    lines = -(-count // columns)
    figure = Figure(figsize=(_INCHES * columns, _INCHES * lines + 0.4), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for spare in axes[count:]:
        figure.delaxes(spare)
    return figure, axes[:count]


def plot_predicted(rows: PredictedRows, *, form: Form = "png") -> bytes:
    """Predicted against measured, one panel a precision policy, on logarithmic axes.

    Each panel shows the diagonal, a band of 25 % around it, and in its title rows and MAPE. Raises ``InputError``
    without matplotlib.
    """
    require_matplotlib()
    from matplotlib.ticker import LogLocator

    with own_style():
        order = {name: place for place, name in enumerate(PRECISIONS)}
        policies = sorted(set(rows.precisions), key=lambda name: (order.get(name, len(order)), name))
        figure, panels = lay_out(len(policies), most_in_line=_PANELS_IN_LINE)
        figure.suptitle(f"Predicted against measured: {rows.title}", parse_math=False)
        chosen = np.array(rows.precisions)
        unit = f" ({rows.unit} a step)" if rows.unit else " speed-up"
        for axes, policy in zip(panels, policies, strict=True):
            own = chosen == policy
            both = np.concatenate([rows.measured_s[own], rows.predicted_s[own]])
            limits = np.array([both.min() / 1.5, both.max() * 1.5])
            axes.fill_between(
                limits, limits * (1 - _BAND), limits * (1 + _BAND), color="0.85", linewidth=0, label="within 25 %"
            )
            axes.plot(limits, limits, color="0.4", linewidth=0.8)
            _draw_points(axes, rows.measured_s[own], rows.predicted_s[own], limits=limits)
            axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
            for axis in (axes.xaxis, axes.yaxis):
                # few labels over many decades, enough over less than one
                axis.set_major_locator(LogLocator(subs=(1.0,) if limits[1] > 100 * limits[0] else (1.0, 2.0, 5.0)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter("")
            axes.set_xlabel(f"measured{unit}")
            axes.set_ylabel(f"predicted{unit}")
            axes.set_title(f"{policy}: {own.sum()} rows, MAPE {100 * rows.errors[own].mean():.1f} %", fontsize=8)
        panels[0].legend(loc="upper left", frameon=False)
        return render_figure(figure, form)


def _draw_points(axes: "Axes", measured: Floats, predicted: Floats, *, limits: Floats) -> None:
    """A point a row; where they are too many, hexagons, the darker the more rows in them (white: less than one)."""
    if len(measured) > _MOST_POINTS:
        axes.hexbin(
            measured, predicted, xscale="log", yscale="log", extent=(*np.log10(limits), *np.log10(limits)),
            gridsize=_HEXAGONS_ACROSS, mincnt=1, bins="log", vmin=0.05, cmap="Blues", linewidths=0, rasterized=True,
        )  # fmt: skip
        return
    # a few points are to be seen, hundreds are not to cover each other
    size, alpha = (5, 0.35) if len(measured) > _MANY_POINTS else (18, 0.8)
    axes.scatter(measured, predicted, s=size, alpha=alpha, linewidths=0, color="C0", rasterized=True)


def plot_distance(rows: PredictedRows, *, form: Form = "png") -> bytes:
    """Absolute errors by distance from the data: a panel by regime, and one for each of the ``steps``.

    A box reaches from the 25th to the 75th percentile of the errors of its rows, with the median as a line and
    whiskers to the 5th and 95th; a diamond is the MAPE. Raises ``InputError`` without matplotlib.
    """
    require_matplotlib()
    with own_style():
        groups = {"regime": _group_regimes(rows.regimes)}
        groups |= {name: _group_steps(steps) for name, steps in rows.steps.items()}
        figure, panels = lay_out(len(groups), most_in_line=len(groups))
        figure.suptitle(f"Errors by distance from the training data: {rows.title}", parse_math=False)
        errors = np.maximum(100 * rows.errors, _SMALLEST_ERROR)
        for axes, (name, places) in zip(panels, groups.items(), strict=True):
            _draw_boxes(axes, {label: errors[own] for label, own in places.items()})
            axes.set_xlabel(name)
            axes.sharey(panels[0])
        panels[0].set_ylabel("absolute error (% of measured)")
        panels[0].set_yscale("log")
        panels[0].yaxis.set_major_formatter("{x:g}")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", frameon=False)
        return render_figure(figure, form)


def _group_regimes(regimes: Sequence[str]) -> dict[str, npt.NDArray[np.bool_]]:
    labels = np.array(regimes)
    order = [*REGIMES, *sorted(set(regimes) - set(REGIMES))]
    return {name or "none": labels == name for name in order if (labels == name).any()}


def _group_steps(steps: Floats) -> dict[str, npt.NDArray[np.bool_]]:
    # A size that is the same up to the rounding of its logarithm is in the data.
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
    results: Mapping[str, CrossValidation], observations: Sequence[Observation], *, form: Form = "png"
) -> dict[str, bytes]:
    """Both pictures of every split by file name (``row-predicted.png``, ``row-distance.png``); speed-ups have one.

    Splits that score a part of another's rows (without contests) are left out.
    """
    pictures = {}
    for split, result in results.items():
        if split != SPEED_UP and split not in SPLITS:
            continue
        rows = PredictedRows.of_cross_validation(result, observations)
        pictures[f"{split}-predicted.{form}"] = plot_predicted(rows, form=form)
        if split != SPEED_UP:
            pictures[f"{split}-distance.{form}"] = plot_distance(rows, form=form)
    return pictures


def draw_table(
    table: PredictedTable, *, title: str, domain: TrainingDomain | None = None, form: Form = "png"
) -> dict[str, bytes]:
    """``predicted.png`` and ``distance.png`` of an evaluated table."""
    rows = PredictedRows.of_table(table, title=title, domain=domain)
    return {f"predicted.{form}": plot_predicted(rows, form=form), f"distance.{form}": plot_distance(rows, form=form)}


def write_plots(pictures: Mapping[str, bytes], folder: str) -> tuple[str, ...]:
    """Put drawn pictures into ``folder`` and return their paths: all of them, or after an error none.

    Pictures of the same names are replaced, and put back when a later one cannot be written. Raises what the store
    raises.
    """
    store = open_store(folder)
    earlier = {name: store.read_bytes(name) for name in pictures if store.exists(name)}
    written: list[str] = []
    try:
        for name, data in sorted(pictures.items()):
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


def plot_table(
    table: PredictedTable, *, folder: str, title: str, domain: TrainingDomain | None = None, form: Form = "png"
) -> tuple[str, ...]:
    """``draw_table`` into ``folder``; the paths."""
    return write_plots(draw_table(table, title=title, domain=domain, form=form), folder)
