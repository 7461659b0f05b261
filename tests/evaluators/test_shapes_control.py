"""Scores of ControlNets and of editing in the shapes world, for networks that do what they are asked, or do not."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diff_dalle.config import InputError
from diff_dalle.evaluators.control import control, edge_agreement
from diff_dalle.evaluators.editing import editing, replacements
from diff_dalle.images.control_filters.table import ControlConfig
from diff_dalle.images.signal import PixelSignal
from diff_dalle.worlds.shapes.prompts import shape_prompts
from diff_dalle.worlds.shapes.render import render
from diff_dalle.worlds.shapes.scenes import ShapesConfig

WORLD, SIZE, N = ShapesConfig(), 32, 12


def controlled(sample, control_filter, seed=0, world=WORLD):
    """The scores and the section of a network with this filter, whose samples these are."""
    base = SimpleNamespace(image_size=SIZE, stages=[SimpleNamespace(signal=None)])
    context = SimpleNamespace(base=base, steer=sample, shapes=world)
    context.settings = SimpleNamespace(prompts_per_task=N, seed=seed)
    context.steering = SimpleNamespace(control_filter=lambda signal: control_filter)
    context.shape_prompts = lambda tasks: shape_prompts(N, seed, world, tasks)
    found = control(context)
    return found.scores["control"], found.sections[0]


def test_edges_agree_with_themselves_and_less_the_further_away():
    edges = torch.zeros(2, 1, 16, 16, dtype=torch.bool)
    edges[:, :, 4:12, 6] = True
    moved = [edges.roll(shift, 3) for shift in (0, 1, 2, 6)]
    scores = [edge_agreement(edges, each) for each in moved]
    assert scores == [1.0, 0.5, pytest.approx(1 / 5), 0.0]
    none = torch.zeros_like(edges)
    assert edge_agreement(none, none) == 1.0 and edge_agreement(edges, none) == 0.0


def test_samples_that_follow_the_control_and_the_caption():
    """Real pictures of the prompts, which leave open where the objects are; without control the same one each time."""
    prompts = shape_prompts(N, 3, WORLD, ("attributes",))
    real = np.stack([render(prompt.scene, SIZE) for prompt in prompts])
    seen = []

    def sample(texts, control):
        for text, prompt in zip(texts, prompts, strict=True):
            item = prompt.scene.objects[0]
            assert item.color in text and item.shape in text and item.size not in text and item.position not in text
        seen.append(control)
        return real if control is not None else real[:1].repeat(N, 0)

    canny = ControlConfig("canny", '{"resize": 0}').create()
    scores, section = controlled(sample, canny, 3)
    assert scores["with"]["all attributes"]["score"] == scores["with"]["color"]["score"] == 1
    assert scores["without"]["all attributes"]["score"] < 0.5
    assert scores["edges"]["with"] == 1 and scores["edges"]["without"] < 0.5
    assert seen[0].masks is None and np.array_equal(np.stack(seen[0].images), real) and seen[1] is None
    assert "Agreement of edges: 1.000 with" in section.text and next(section.figures).image.width > 3 * SIZE


def test_a_filter_with_masks_is_asked_for_another_object_in_their_place():
    chosen = replacements(N, 0, WORLD, "prompts_per_task", "")
    after = np.stack([render(each.after.scene, SIZE) for each in chosen])
    before = np.stack([render(each.before.scene, SIZE) for each in chosen])

    def sample(texts, control):
        if control is None:
            return before
        assert np.array_equal(np.stack(control.images), before) and len(control.masks) == len(chosen)
        assert all(0.1 < mask.mean() < 0.6 for mask in control.masks)
        return after

    scores, section = controlled(sample, ControlConfig("inpaint").create())
    assert scores["with"]["all attributes"]["score"] == 1 and scores["without"]["all attributes"]["score"] == 0
    assert "edges" not in scores and "Agreement" not in section.text
    assert scores["kept"]["without"] == 60 > scores["kept"]["with"] > 20  # of other backgrounds


def test_a_world_without_replacements_is_refused():
    world = ShapesConfig(shapes=("circle",), colors=("red",), held_out=(), pair_fraction=0.0)
    with pytest.raises(InputError, match="gives 0 replacements"):
        controlled(lambda texts, control: None, ControlConfig("inpaint").create(), world=world)


# ------------------------------------------------------------------------------------------------------------- editing


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
