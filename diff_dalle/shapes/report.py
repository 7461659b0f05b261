"""What a reader wants to see of a model of the shapes world: pictures, scores, and how training went."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np

from .. import storage
from ..evaluation.report import Section, line_plot
from ..images.grid import image_grid
from .prompts import ShapePrompt
from .shape_eval import ShapeReport

SHOWN = 6  # pictures of each task in the grid
SCALE = 3  # screen pixels per pixel of a 32-pixel picture

EXPLANATION = """
A picture is right when the number of things in it, their shapes and everything that the caption says are right, judged
from its pixels alone. *Chance*: the same pictures judged by each other's captions. *Ceiling*: real renders of the same
captions, as they are and blurred and noisy. *n* captions a task, 95 % intervals (Wilson).
"""


def picture_section(images: np.ndarray, prompts: Sequence[ShapePrompt], kind: str = "") -> Section:
    """A grid with one row of pictures for each task. images: uint8 [N, H, W, 3], picture i for prompt i; kind: what to
    call them after the word, where there are others."""
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    chosen = [i for task in tasks for i in [k for k, prompt in enumerate(prompts) if prompt.task == task][:SHOWN]]
    columns = len(chosen) // len(tasks)
    grid = image_grid(images[chosen], [prompts[i].text for i in chosen], columns, max(1, SCALE * 32 // images.shape[1]))
    rows = "; ".join(tasks)
    text, name = f"The first captions of every task, not chosen by hand. Rows: {rows}.", kind.replace(" ", "_")
    return Section(f"Pictures{kind}", text, grid, f"grid{name}.png")


def score_section(report: ShapeReport, kind: str = "") -> Section:
    empty = f"\n\nPictures in which nothing was found: {report.empty:.1%}."
    title = f"Was the text understood{kind and ',' + kind}?"
    return Section(title, EXPLANATION + "\n" + report.table() + empty)


def training_sections(progress: str) -> list[Section]:
    """Plots from a run's progress.csv, a local or remote path: held-out loss by noise level, and the caption-swap gap.

    Empty when the run had no held-out data.
    """
    rows = list(csv.DictReader(io.StringIO(storage.read_text(progress))))
    sections = []
    for key, title, text in (
        ("loss", "Held-out loss by noise level",
         "Mean loss on unseen scenes at fixed noise, in four quarters of the process: q0 has the least noise."),
        ("caption_swap_gap", "Caption-swap gap",
         "How much the held-out loss rises when captions are exchanged: above 0, the model uses its text."),
    ):  # fmt: skip
        series = {}
        for quartile in ("q0", "q1", "q2", "q3"):
            name = f"held_out/{key}_{quartile}"
            points = [(float(row["step"]), float(row[name])) for row in rows if row.get(name)]
            if points:
                series[quartile] = points
        if series:
            values = [y for line in series.values() for _, y in line]
            span = (min(0.0, min(values)), max(values) * 1.05 or 1.0)
            sections.append(Section(title, text, line_plot(series, "step", span), f"{key}.png"))
    return sections
