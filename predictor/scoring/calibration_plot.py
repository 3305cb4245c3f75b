"""A picture of what calibration gives: error against the number of measured rows."""

from collections.abc import Sequence

import numpy as np

from precision_time.predictor.scoring.calibration_curve import CalibrationCurve
from precision_time.predictor.scoring.plots import Form, lay_out, own_style, render_figure, require_matplotlib
from precision_time.predictor.scoring.scoreboard import title_split
from precision_time.storage.errors import InputError

__all__ = ["plot_calibration"]

_PANELS_IN_LINE = 3
#: Figures drawn, and how they are called.
_FIGURES = (("mape", "MAPE", "C1", "D"), ("median_ape", "median", "C0", "o"))


def plot_calibration(curves: Sequence[CalibrationCurve], *, form: Form = "png") -> bytes:
    """Error against number of measured rows, a panel a split: solid after calibration, dashed without on the same rows.

    Under each number of rows stands how many rows were scored. Raises ``InputError`` without matplotlib, or for
    nothing to draw.
    """
    require_matplotlib()
    shown = [curve for curve in curves if curve.points]
    if not shown:
        raise InputError("nothing to draw", got=f"{len(curves)} curves without points", expected="at least one point")
    with own_style():
        figure, panels = lay_out(len(shown), most_in_line=_PANELS_IN_LINE)
        figure.suptitle("Error after measured rows")
        for axes, curve in zip(panels, shown, strict=True):
            places = np.arange(len(curve.points), dtype=np.float64)
            for name, label, color, marker in _FIGURES:
                before = [100 * (point.before[name] or 0.0) for point in curve.points]
                after = [100 * (point.after[name] or 0.0) for point in curve.points]
                axes.plot(places, before, "--", color=color, linewidth=0.8, label=f"{label}, nothing measured")
                axes.plot(places, after, marker, linestyle="-", color=color, markersize=4, label=label)
            axes.set_title(title_split(curve.split), fontsize=8)
            axes.set_xticks(places, [f"{point.measured}\n({point.rows:,})" for point in curve.points])
            axes.set_xlabel(f"measured rows {curve.what} (rows scored)")
            axes.set_ylim(bottom=0.0)
            axes.grid(axis="y", color="0.9")
            axes.set_axisbelow(True)
        panels[0].set_ylabel("absolute error (% of measured)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        return render_figure(figure, form)
