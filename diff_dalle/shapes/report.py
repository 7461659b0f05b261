"""Report sections for a model of the shapes world: samples and ShapeEval scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..evaluation.report import Section
from ..images.grid import image_grid
from .prompts import ShapePrompt
from .shape_eval import ShapeReport

GRID_COLUMNS = 6  # images per task in the grid

EXPLANATION = """
An image is correct if the number of objects, their shapes and everything that the caption says are right, judged from
its pixels alone. *Chance*: the same images scored against other captions of the task. *Ceiling*: real renders of the
captions, clean and with blur and noise (degraded). *n* captions per task; 95 % Wilson intervals.
"""


def sample_section(images: np.ndarray, prompts: Sequence[ShapePrompt], which: str = "") -> Section:
    """A grid with one row of images per task. images: uint8 [N, H, W, 3], image i sampled for prompt i; which: of the
    report's samples they are."""
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    chosen = [
        i for task in tasks for i in [k for k, prompt in enumerate(prompts) if prompt.task == task][:GRID_COLUMNS]
    ]
    grid = image_grid(images[chosen], [prompts[i].text for i in chosen], len(chosen) // len(tasks))
    text = f"The first captions of every task, not selected. Rows: {'; '.join(tasks)}."
    title, name = (f"Samples, {which}", f"grid_{which}.png") if which else ("Samples", "grid.png")
    return Section(title, text, grid, name)


def score_section(report: ShapeReport, which: str = "") -> Section:
    empty = f"Images without a detected object: {report.empty:.1%}."
    title = f"ShapeEval, {which}" if which else "ShapeEval"
    return Section(title, f"{EXPLANATION}\n{report.table()}\n\n{empty}")
