"""What ShapeEval says of pictures of the shapes world: samples, edited and steered ones, and reconstructions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from ...data.aspect_buckets import parse_ratio, size_of
from ...diffusion.sampling import SamplerConfig
from ...evaluation.guidance_report import GuidanceSetting
from ...evaluation.report import Section
from ...images.grid import image_grid
from ...sampling.request import ImageEdit
from ...shapes.control import evaluate_control
from ...shapes.editing import evaluate_editing
from ...shapes.image_variations import (
    TASKS,
    probe_scenes,
    probe_scores,
    variation_rows,
    variation_section,
    variation_table,
)
from ...shapes.prompts import ShapePrompt
from ...shapes.render import render
from ...shapes.report import sample_section, score_section
from ...shapes.shape_eval import evaluate_shapes
from .context import Context, Findings, joined, rendered

COLUMNS = 10  # pictures in the grid of reconstructions
INVERSION_STEPS = 100  # DDIM inversion reconstructs an image only in small steps, and without guidance


def _scored(images: np.ndarray, prompts: Sequence[ShapePrompt], which: str, key: str, title: str = "") -> Findings:
    report = evaluate_shapes(images, prompts)
    sections = [sample_section(images, prompts, which), score_section(report, which)]
    return Findings(sections, {key: report.to_dict()}, title + report.table())


def samples(context: Context) -> Findings:
    """Of the base's samples, and of the upsampled ones."""
    prompts = context.shape_prompts()
    stages = context.sample([prompt.text for prompt in prompts], context.default_guidance, all_stages=True)
    found = [_scored(stages[0], prompts, "", "scores")]
    if len(stages) > 1:
        found.append(_scored(stages[-1], prompts, "upsampled", "scores upsampled"))
    return joined(found)


def latent_cascade(context: Context) -> Findings:
    """Of a latent cascade at several aspect ratios: of its samples, and of pictures that stages B and A reconstruct."""
    return joined(list(_at_each_ratio(context)))


def _at_each_ratio(context: Context) -> Iterator[Findings]:
    """Height and width of samples are whole positions of all latents, as the buckets of training."""
    pipeline = context.pipeline
    multiple = math.lcm(pipeline.size_multiple, *(stage.signal.scale for stage in pipeline.stages))
    for ratio in context.settings.aspect_ratios:
        size = size_of(parse_ratio("aspect_ratios", ratio), pipeline.image_size**2, multiple)
        prompts, where = context.shape_prompts(), f"{size[1]}×{size[0]}"
        made = context.sample_cascade([prompt.text for prompt in prompts], size)
        yield _scored(made, prompts, where, f"scores {where}", f"Samples {where}:\n\n")
        if context.run.cascade.semantic:
            prompts = [prompt for prompt in prompts if prompt.task in TASKS]
            pictures = rendered(prompts, size)
            again = context.reconstruct(pictures)
            report = evaluate_shapes(again, prompts)
            grid = image_grid(np.concatenate([pictures[:COLUMNS], again[:COLUMNS]]), columns=min(COLUMNS, len(prompts)))
            text = f"Pictures above what stages B and A make of their semantic latents.\n\n{report.table()}"
            section = Section(f"Reconstructions, {where}", text, grid, f"reconstructions_{where}.png")
            table = f"Reconstructions {where}:\n\n{report.table()}"
            yield Findings([section], {f"reconstructions {where}": report.to_dict()}, table)


def image_variations(context: Context) -> Findings:
    """Of variations of pictures by a decoder, from the embeddings of its CLIP."""
    prompts, size = context.shape_prompts(TASKS), context.pipeline.image_size
    pictures = rendered(prompts, size)
    embeddings = context.embed(pictures)
    stages = context.vary(embeddings)
    scenes = probe_scenes(context.shapes)
    known = context.embed(np.stack([render(scene, size) for scene in scenes]))
    rows = variation_rows(evaluate_shapes(stages[-1], prompts), probe_scores(known, scenes, embeddings, prompts))
    section = variation_section(rows, pictures, stages[0] if len(stages) > 1 else None, stages[-1])
    return Findings([section], {"image_variations": {row.name: asdict(row) for row in rows}}, variation_table(rows))


def control(context: Context) -> Findings:
    """Of samples steered by a ControlNet."""
    settings, base = context.settings, context.base
    control_filter = context.steering.control_filter(base.stages[0].signal)
    shown = base.image_size, settings.prompts_per_task, settings.seed, context.shapes
    scores, section = evaluate_control(context.steer, control_filter, *shown)
    return Findings([section], {"control": scores}, section.text)


def editing(context: Context) -> Findings:
    """Of inpainting, image to image and variations."""
    steps = min(INVERSION_STEPS, context.base.stages[0].diffusion.diffusion_steps)

    def sample(prompts: Sequence[str], edit: ImageEdit) -> np.ndarray:
        if edit.config.variation is None:
            return context.edit(prompts, edit, context.default_guidance)
        return context.edit(prompts, edit, GuidanceSetting(1.0, 0.0), sampler=SamplerConfig("ddim", str(steps)))

    pipeline, settings = context.pipeline, context.settings
    shown = pipeline.stages[-1].signal, pipeline.image_size, settings.edits, settings.seed, context.shapes
    scores, sections = evaluate_editing(sample, *shown)
    return Findings(sections, {"editing": scores})
