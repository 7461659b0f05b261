"""The parser of shapes: exact on clean renders, robust to blur and noise, silent on what is not a shape."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from marks import slow

from diff_dalle.config import InputError
from diff_dalle.worlds.shapes.parser import parse_shapes
from diff_dalle.worlds.shapes.render import render
from diff_dalle.worlds.shapes.scenes import (
    BACKGROUNDS,
    COLORS,
    POSITIONS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    ShapesConfig,
    scene,
)
from diff_dalle.worlds.shapes.shape_eval import degrade

EVERYTHING = ShapesConfig(
    backgrounds=tuple(BACKGROUNDS), shapes=SHAPES, colors=tuple(COLORS), positions=tuple(POSITIONS), held_out=()
)
MIXED = [scene(EVERYTHING, i) for i in range(300)]
ATTRIBUTES = ("shape", "color", "size", "position")


def renders(scenes, image_size=32) -> np.ndarray:
    return np.stack([render(content, image_size) for content in scenes])


@pytest.fixture(scope="module")
def images():
    return renders(MIXED)


@pytest.fixture(scope="module")
def parsed(images):
    return parse_shapes(images)


def accuracy(scenes, parsed) -> dict[str, float]:
    """Fraction of images in which all objects have the attribute, found objects matched to true ones by place."""
    right = dict.fromkeys(ATTRIBUTES, 0)
    for content, found in zip(scenes, parsed, strict=True):
        if len(found) != len(content.objects):
            continue
        rows = [min(found, key=lambda f, t=t: (f.x - t.x) ** 2 + (f.y - t.y) ** 2) for t in content.objects]
        for field in ATTRIBUTES:
            right[field] += all(
                getattr(f, field) == getattr(t, field) for f, t in zip(rows, content.objects, strict=True)
            )
    return {field: count / len(scenes) for field, count in right.items()}


def test_exact_on_every_combination():
    """All 864 combinations of shape, color, size and position, on every background in turn, parse exactly."""
    combinations = itertools.product(SHAPES, COLORS, SIZES, POSITIONS)
    scenes = [
        Scene("single", (SceneObject(c, s, z, p, *POSITIONS[p]),), None, tone, "plain", (0.0, 0.0), 0)
        for (s, c, z, p), tone in zip(combinations, itertools.cycle(BACKGROUNDS), strict=False)
    ]
    assert len(scenes) == 864
    assert accuracy(scenes, parse_shapes(renders(scenes))) == dict.fromkeys(ATTRIBUTES, 1.0)


def test_exact_on_whole_scenes(images, parsed):
    """Jitter, gradients, grain and up to three objects: at least 0.995 of images right in each attribute, at least 0.97
    after a blur of 0.5 pixels and noise of 10/255. Centers lie within one pixel of the true ones."""
    found, degraded = accuracy(MIXED, parsed), accuracy(MIXED, parse_shapes(degrade(images)))
    assert min(found.values()) >= 0.995 and min(degraded.values()) >= 0.97, (found, degraded)
    for content, objects in zip(MIXED, parsed, strict=True):
        for item in content.objects:
            assert min(max(abs(f.x - item.x), abs(f.y - item.y)) for f in objects) <= 1 / 32


@pytest.mark.parametrize("image_size", [64, (40, 88), slow((88, 40))])
def test_exact_on_whole_scenes_of_other_sizes(image_size):
    assert min(accuracy(MIXED[:60], parse_shapes(renders(MIXED[:60], image_size))).values()) >= 0.995


def test_an_image_parses_the_same_alone_and_among_others(images, parsed):
    """No image's answer depends on which others are in the batch."""
    for i in (0, 31, 69):
        (alone,) = parse_shapes(images[i : i + 1])
        assert [replace(f, fit=0.0) for f in alone] == [replace(f, fit=0.0) for f in parsed[i]]


def test_objects_of_a_wide_image_are_as_large_as_in_a_square_of_its_height():
    """Their places are fractions of both sides."""
    item = SceneObject("red", "circle", "small", "top right", *POSITIONS["top right"])
    content = Scene("single", (item,), None, "white", "plain", (0.0, 0.0), 0)
    wide, square = (np.abs(render(content, size).astype(int) - 238).sum(2) > 60 for size in ((32, 80), 32))
    assert wide.sum() == square.sum() and np.array_equal(wide.any(1), square.any(1))
    assert np.array_equal(wide.any(0).nonzero()[0], square.any(0).nonzero()[0] + 36)  # 0.75 · 80 - 0.75 · 32
    (found,) = parse_shapes(render(content, (32, 80))[None])[0]
    assert (found.x, found.y) == (0.75, 0.25) and (found.size, found.position) == ("small", "top right")


def test_images_that_are_too_long_are_refused():
    with pytest.raises(InputError, match="images to parse are 130×32, but the ratio of sides must be at most 4"):
        parse_shapes(np.zeros((1, 32, 130, 3), np.uint8))


def smooth_noise(generator, n: int) -> np.ndarray:
    """Noise averaged over 3 × 3 pixels and stretched to the contrast of a scene."""
    noise = generator.normal(size=(n, 34, 34, 3))
    mean = sum(noise[:, y : y + 32, x : x + 32] for y, x in itertools.product(range(3), repeat=2)) / 3
    return np.clip(128 + 60 * mean, 0, 255).astype(np.uint8)


GARBAGE = {
    "noise": lambda g: g.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8),
    "smooth noise": lambda g: smooth_noise(g, 64),
    "blank": lambda g: np.broadcast_to(g.integers(0, 256, (64, 1, 1, 3), dtype=np.uint8), (64, 32, 32, 3)).copy(),
    "gradient": lambda g: np.broadcast_to(
        np.linspace(0, 255, 32).astype(np.uint8)[:, None, None], (8, 32, 32, 3)
    ).copy(),
    "shuffled pixels": lambda g: g.permuted(renders(MIXED[:64]).reshape(64, 1024, 3), axis=1).reshape(64, 32, 32, 3),
    "average of scenes": lambda g: np.stack(
        [renders([MIXED[i] for i in g.permutation(300)[:30]]).mean(0).astype(np.uint8) for _ in range(32)]
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_holds_no_shapes(name):
    """Images without shapes yield an empty list (one in twenty may slip through)."""
    found = parse_shapes(GARBAGE[name](np.random.default_rng(0)))
    assert np.mean([bool(objects) for objects in found]) <= 0.05


def test_a_washed_out_color_is_no_color():
    """A gray shape on a white background is found, and its color is ``other``."""
    content = Scene(
        "single", (SceneObject("red", "square", "large", "center", 0.5, 0.5),), None, "white", "plain", (0, 0), 0
    )
    image = render(content)
    image[(image != image[0, 0]).any(2)] = 128
    ((item,),) = parse_shapes(image[None])
    assert (item.color, item.shape) == ("other", "square")


@pytest.mark.parametrize("images", [np.zeros((1, 32, 32), np.uint8), np.zeros((1, 32, 32, 3), np.float32)])
def test_wrong_arrays_are_refused(images):
    """Anything but [N, H, W, 3] uint8 is named in the message."""
    with pytest.raises(InputError, match="uint8"):
        parse_shapes(images)
