"""Samples steered by a ControlNet, of pictures of the shapes world."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...sampling.control import Control
from ...shapes.control import evaluate_control
from .context import Context
from .contract import BASE, CONTROLNET, SHAPES_WORLD, Evaluator, Findings


def run(context: Context) -> Findings:
    def sample(prompts: Sequence[str], control: Control | None) -> np.ndarray:
        return context.steer(prompts, control)

    settings = context.settings
    control_filter = context.steering.control_filter(context.base.stages[0].signal)
    scores, section = evaluate_control(
        sample, control_filter, context.base.image_size, settings.prompts_per_task, settings.seed, context.shapes
    )
    return Findings([section], {"control": scores}, section.text)


CONTROL = Evaluator("control", (BASE, SHAPES_WORLD, CONTROLNET), run, asked_by="controlnet")
