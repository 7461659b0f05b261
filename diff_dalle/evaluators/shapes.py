"""What ShapeEval says of pictures of the shapes world: samples, and reconstructions of a latent cascade."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..data.buckets import parse_ratio, size_of
from ..evaluation.report import Figure, Report, Section
from ..images.grid import image_grid
from ..worlds.shapes.prompts import ShapePrompt
from ..worlds.shapes.shape_eval import evaluate_shapes
from .context import Context, renders_of
from .image_variations import TASKS

COLUMNS = 10  # pictures in the grid of reconstructions
GRID_COLUMNS = 6  # images per task in the grid

EXPLANATION = """
An image is correct if the number of objects, their shapes and everything that the caption says are right, judged from
its pixels alone. *Chance*: the same images scored against other captions of the task. *Ceiling*: real renders of the
captions, clean and with blur and noise (degraded). *n* captions per task; 95 % Wilson intervals.
"""


def _scored(images: np.ndarray, prompts: Sequence[ShapePrompt], which: str, key: str) -> Report:
    """ShapeEval of samples, and some of them. which: of the report's samples they are."""
    report = evaluate_shapes(images, prompts)
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    chosen = list[int]()
    for task in tasks:
        chosen += [i for i, prompt in enumerate(prompts) if prompt.task == task][:GRID_COLUMNS]
    grid = image_grid(images[chosen], [prompts[i].text for i in chosen], len(chosen) // len(tasks))
    text = f"The first captions of every task, not selected. Rows: {'; '.join(tasks)}."
    empty = f"Images without a detected object: {report.empty:.1%}."
    after, name = (f", {which}", f"grid_{which}.png") if which else ("", "grid.png")
    sections = [
        Section(f"Samples{after}", [text, Figure(name, grid)]),
        Section(f"ShapeEval{after}", [EXPLANATION, report.table(), empty]),
    ]
    return Report(sections, {key: report.to_dict()}, [f"ShapeEval{after}:", report.table()])


def samples(context: Context) -> Report:
    """Of the base's samples, and of the upsampled ones."""
    prompts = context.shape_prompts()
    stages = context.sample([prompt.text for prompt in prompts], context.default_guidance, all_stages=True)
    found = [_scored(stages[0], prompts, "", "scores")]
    if len(stages) > 1:
        found.append(_scored(stages[-1], prompts, "upsampled", "scores upsampled"))
    return Report.joined(found)


def latent_cascade(context: Context) -> Report:
    """Of a latent cascade at several aspect ratios: of its samples, and of pictures that stages B and A reconstruct."""
    return Report.joined(_at_each_ratio(context))


def _at_each_ratio(context: Context) -> Iterator[Report]:
    """Height and width of samples are whole positions of all latents, as the buckets of training."""
    pipeline = context.pipeline
    multiple = math.lcm(pipeline.size_multiple, *(stage.signal.scale for stage in pipeline.stages))
    for ratio in context.settings.aspect_ratios:
        size = size_of(parse_ratio("aspect_ratios", ratio), pipeline.image_size**2, multiple)
        prompts, where = context.shape_prompts(), f"{size[1]}×{size[0]}"
        made = context.sample_cascade([prompt.text for prompt in prompts], size)
        yield _scored(made, prompts, where, f"scores {where}")
        if context.run.cascade.semantic:
            prompts = [prompt for prompt in prompts if prompt.task in TASKS]
            pictures = renders_of(prompts, size)
            again = context.reconstruct(pictures)
            report = evaluate_shapes(again, prompts)
            grid = image_grid(np.concatenate([pictures[:COLUMNS], again[:COLUMNS]]), columns=min(COLUMNS, len(prompts)))
            text = "Pictures above what stages B and A make of their semantic latents."
            figure = Figure(f"reconstructions_{where}.png", grid)
            section = Section(f"Reconstructions, {where}", [text, report.table(), figure])
            scores = {f"reconstructions {where}": report.to_dict()}
            yield Report([section], scores, [f"Reconstructions {where}:", report.table()])
