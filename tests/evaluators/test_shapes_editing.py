"""The evaluation of editing on its own: the world and the signal it works with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from diff_dalle.config import InputError
from diff_dalle.evaluators.editing import editing
from diff_dalle.images.signal import PixelSignal
from diff_dalle.worlds.shapes.scenes import ShapesConfig

WORLD = ShapesConfig()


def copies(prompts, edit, *_):
    """An editor that returns what it is given, in gray."""
    gray = PixelSignal(1)
    return gray.to_pixels(gray.from_pixels(np.stack(edit.images)))


def edited(config=WORLD, channels=3):
    stage = SimpleNamespace(signal=PixelSignal(channels), diffusion=SimpleNamespace(diffusion_steps=4))
    pipeline = SimpleNamespace(stages=[stage], image_size=32)
    context = SimpleNamespace(pipeline=pipeline, base=pipeline, shapes=config, default_guidance=None, edit=copies)
    context.settings = SimpleNamespace(edits=4, seed=0)
    return editing(context).scores["editing"]


def test_originals_are_as_the_generator_sees_them():
    """Gray for a grayscale generator, so that pixels it keeps count as kept."""
    scores = edited(channels=1)
    assert scores["inpainting"]["unmasked_identical"]
    assert scores["variation"]["variation 0"] == 60
    assert not edited()["inpainting"]["unmasked_identical"]


def test_a_world_without_anything_to_replace_is_refused():
    world = replace(WORLD, shapes=("circle",), held_out=(), pair_fraction=0.0)
    with pytest.raises(InputError, match="0 replacements of an object by another, but 2 are required: .*edits"):
        edited(world)
