"""Inpainting, image to image and variations of images of the shapes world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...diffusion.sampling import SamplerConfig
from ...evaluation.guidance_report import GuidanceSetting
from ...sampling.request import ImageEdit
from ...shapes.editing import evaluate_editing
from .context import Context
from .contract import BASE, EDITS, SHAPES_WORLD, Evaluator, Findings

INVERSION_STEPS = 100  # DDIM inversion reconstructs an image only in small steps, and without guidance


def run(context: Context) -> Findings:
    steps = min(INVERSION_STEPS, context.base.stages[0].diffusion.diffusion_steps)

    def sample(prompts: Sequence[str], edit: ImageEdit) -> np.ndarray:
        if edit.config.variation is None:
            return context.edit(prompts, edit, context.default_guidance)
        return context.edit(prompts, edit, GuidanceSetting(1.0, 0.0), sampler=SamplerConfig("ddim", str(steps)))

    pipeline, settings = context.pipeline, context.settings
    scores, sections = evaluate_editing(
        sample, pipeline.stages[-1].signal, pipeline.image_size, settings.edits, settings.seed, context.shapes
    )
    return Findings(sections, {"editing": scores})


EDITING = Evaluator("editing", (BASE, SHAPES_WORLD, EDITS), run)
