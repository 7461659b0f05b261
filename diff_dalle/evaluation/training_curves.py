"""Training curves from a run's progress.csv: held-out loss by noise level, and the caption-swap gap."""

from __future__ import annotations

import csv
import io
import math

from .. import storage
from .plots import line_plot
from .report import Figure, Section

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
