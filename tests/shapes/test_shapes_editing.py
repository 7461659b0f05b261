"""The evaluation of editing on its own: the world and the signal it works with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diff_dalle.errors import InputError
from diff_dalle.images.signal import PixelSignal
from diff_dalle.shapes.editing import evaluate_editing
from diff_dalle.shapes.scenes import ShapesConfig


def copies(prompts, edit):
    """An editor that returns what it is given, in gray."""
    gray = PixelSignal(1)
    return gray.to_pixels(gray.from_pixels(np.stack(edit.images)))


def test_originals_are_as_the_generator_sees_them():
    """Gray for a grayscale generator, so that pixels it keeps count as kept."""
    scores, _ = evaluate_editing(copies, PixelSignal(1), 32, 4, 0, ShapesConfig())
    assert scores["inpainting"]["unmasked_identical"]
    assert scores["variation"]["variation 0"] == 60
    scores, _ = evaluate_editing(copies, PixelSignal(3), 32, 4, 0, ShapesConfig())
    assert not scores["inpainting"]["unmasked_identical"]


def test_a_world_without_anything_to_replace_is_refused():
    world = replace(ShapesConfig(), shapes=("circle",), held_out=(), pair_fraction=0.0)
    with pytest.raises(InputError, match="0 replacements of an object by another, but editing requires 2: .*edits"):
        evaluate_editing(copies, PixelSignal(3), 32, 4, 0, world)
