"""Line plots with matplotlib (the extra ``plot``), which is imported when the first plot is drawn, and training curves.

Figures are drawn on the Agg canvas without pyplot, so they need no display and leave no figure open.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from .. import storage
from ..config import InputError
from .report import Figure, Section

INSTALL = "pip install 'diff_dalle[plot]'"

# Okabe & Ito's palette, which readers with color vision deficiency can distinguish, without its yellow, which is too
# light on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more, so that color and marker repeat together only late
REFERENCE = "#666666"  # color of reference lines
_INCHES = (6.8, 3.4)
_DPI = 160  # 1088 pixels wide: sharp in a README on high-density displays
_STYLE: dict = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


class MissingMatplotlib(InputError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise MissingMatplotlib, an InputError that names the extra, if plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlib(f"plots require matplotlib, which is not installed ({error}): {INSTALL}") from None


class OptionalPlot:
    """Draws where it can: a plot is not worth ending a run for. The first one that is omitted is told."""

    told = False

    def __call__(self, name: str, draw: Callable[[], Any]) -> tuple[str, dict[str, np.ndarray]]:
        """A note, "" = none, and by the name what ``draw`` draws, if it draws anything."""
        try:
            plot = draw()
        except MissingMatplotlib as error:
            note = "" if self.told else f"The plot {name}.png is omitted: {error}"
            self.told = True
            return note, {}
        return "", {} if plot is None else {name: np.asarray(plot)}


def line_plot(
    series: Mapping[str, Sequence[tuple[float, ...]]],
    x_label: str,
    y_label: str = "",
    y_range: tuple[float, float] = (0.0, 1.0),
    references: Mapping[str, float] | None = None,
) -> Image.Image:
    """Lines with markers and error bars, a grid, and a legend beside the axes: an RGB image.

    series:     points (x, y) or (x, y, low, high) by name; low and high are the ends of the error bar.
    references: horizontal dashed lines by name, such as the chance level.

    Raises MissingMatplotlib.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with rc_context(_STYLE):
        figure = Canvas(figsize=_INCHES, dpi=_DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        styles = zip(itertools.cycle(COLORS), itertools.cycle(MARKERS), strict=False)
        lines = [
            _draw_line(axes, name, points, color, marker)
            for (name, points), (color, marker) in zip(series.items(), styles, strict=False)
        ]
        for name, level in (references or {}).items():
            lines.append(axes.axhline(level, color=REFERENCE, linestyle="--", linewidth=1.2, zorder=1, label=name))
        padding = 0.03 * (y_range[1] - y_range[0])  # room for the markers at the ends of the range
        axes.set(xlabel=x_label, ylabel=y_label, ylim=(y_range[0] - padding, y_range[1] + padding))
        figure.legend(handles=lines, loc="outside right upper")
        canvas.draw()
        return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def _draw_line(axes, name: str, points: Sequence[tuple[float, ...]], color: str, marker: str):
    """Returns what the legend shows."""
    x, y, *ends = zip(*points, strict=True)
    # matplotlib takes lengths, which rounding must not make negative.
    bars = np.maximum([np.subtract(y, ends[0]), np.subtract(ends[1], y)], 0) if ends else None
    style = {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.6, "capsize": 2.5}
    return axes.errorbar(x, y, bars, label=name, **style)


# ---------------------------------------------------------------------------------------------------- training curves

# Columns of progress.csv, label, title and explanation of the plot.
CURVES = (
    (
        "loss",
        "held-out loss",
        "Held-out loss by noise level",
        "Mean loss on held-out scenes at fixed noise, by quartile of the timesteps: q0 has the least noise.",
    ),
    (
        "caption_swap_gap",
        "caption-swap gap",
        "Caption-swap gap",
        "Increase of the held-out loss when captions are swapped between images: above 0, the model uses its text.",
    ),
)


def training_sections(progress: str) -> list[Section]:
    """Plots of a run's progress.csv, local or remote: held-out loss by noise level, and the caption-swap gap.

    Empty for a run without held-out data. Raises MissingMatplotlib.
    """
    rows = list(csv.DictReader(io.StringIO(storage.read_text(progress))))
    sections = []
    for key, label, title, text in CURVES:
        series: dict[str, list[tuple[float, ...]]] = {}
        for quartile in ("q0", "q1", "q2", "q3"):
            name = f"held_out/{key}_{quartile}"
            points = [(float(row["step"]), float(row[name])) for row in rows if row.get(name)]
            finite = [(step, value) for step, value in points if math.isfinite(value)]
            if finite:
                series[quartile] = list(finite)
        if series:
            values = [y for line in series.values() for _, y in line]
            span = (min(0.0, *values), max(0.0, *values) * 1.05 or 1.0)
            plot = line_plot(series, "step", label, span)
            sections.append(Section(title, [text, Figure(f"{key}.png", plot)]))
    return sections
