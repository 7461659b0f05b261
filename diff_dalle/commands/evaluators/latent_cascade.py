"""ShapeEval of a latent cascade at several aspect ratios: of its samples, and of pictures that stages B and A
reconstruct."""

from __future__ import annotations

import math

import numpy as np

from ...data.aspect_buckets import parse_ratio, size_of
from ...evaluation.report import Section
from ...images.grid import image_grid
from ...shapes.image_variations import TASKS
from ...shapes.report import sample_section, score_section
from ...shapes.shape_eval import evaluate_shapes
from .context import Context, rendered
from .contract import CASCADE, SHAPES_WORLD, Evaluator, Findings

COLUMNS = 10  # pictures in the grid of reconstructions


def run(context: Context) -> Findings:
    found = [_at(context, size) for size in _sizes(context)]
    scores = {name: score for each in found for name, score in each.scores.items()}
    return Findings(
        [section for each in found for section in each.sections], scores, "\n\n".join(each.table for each in found)
    )


def _sizes(context: Context) -> list[tuple[int, int]]:
    """Height and width of samples of each aspect ratio: whole positions of all latents, as the buckets of training."""
    pipeline, found = context.pipeline, [parse_ratio("aspect_ratios", text) for text in context.settings.aspect_ratios]
    multiple = math.lcm(pipeline.size_multiple, *(stage.signal.scale for stage in pipeline.stages))
    return [size_of(ratio, pipeline.image_size**2, multiple) for ratio in found]


def _at(context: Context, size: tuple[int, int]) -> Findings:
    """The findings for one size of samples."""
    prompts, where = context.shape_prompts(), f"{size[1]}×{size[0]}"
    samples = context.sample_cascade([prompt.text for prompt in prompts], size)
    report = evaluate_shapes(samples, prompts)
    sections = [sample_section(samples, prompts, where), score_section(report, where)]
    scores, tables = {f"scores {where}": report.to_dict()}, [f"Samples {where}:\n\n{report.table()}"]
    if context.run.cascade.semantic:
        prompts = [prompt for prompt in prompts if prompt.task in TASKS]
        pictures = rendered(prompts, size)
        again = context.reconstruct(pictures)
        report = evaluate_shapes(again, prompts)
        grid = image_grid(np.concatenate([pictures[:COLUMNS], again[:COLUMNS]]), columns=min(COLUMNS, len(prompts)))
        text = f"Pictures above what stages B and A make of their semantic latents.\n\n{report.table()}"
        sections.append(Section(f"Reconstructions, {where}", text, grid, f"reconstructions_{where}.png"))
        scores[f"reconstructions {where}"] = report.to_dict()
        tables.append(f"Reconstructions {where}:\n\n{report.table()}")
    return Findings(sections, scores, "\n\n".join(tables))


LATENT_CASCADE = Evaluator("latent_cascade", (CASCADE, SHAPES_WORLD), run)
