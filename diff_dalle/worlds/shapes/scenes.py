"""The shapes world: scenes of colored shapes, each a function of a seed and an index.

Images and captions of this small world are known exactly, so a text-to-image model can be trained on a laptop and its
samples scored attribute by attribute. ``scene`` draws the content of image i, ``render.render`` its pixels,
``captions.training_caption`` its text; ``shards.write_shapes`` packs both into webdataset shards.

To add a shape: an outline in ``render.OUTLINES`` and its name in ``SHAPES``. To add a color, background or position: a
line in the table below. Captions, prompts and ShapeEval follow from the tables.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import Fault, named, nearest, option, settings
from ...config.bounds import MAX_SEED, MAX_SIDE
from ...data.buckets import parse_ratio
from ...randomness import random_uniform

SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")

# sRGB, 0..255. Any two entries of these two tables are at least 100 levels apart (Euclidean distance), ten times the
# standard deviation of the noise under which ShapeEval must still separate them.
COLORS = {
    "red": (205, 20, 45),
    "green": (30, 165, 60),
    "blue": (35, 70, 225),
    "yellow": (250, 230, 50),
    "purple": (150, 45, 190),
    "orange": (245, 120, 10),
    "cyan": (30, 205, 220),
    "pink": (255, 110, 190),
}
BACKGROUNDS = {"white": (238, 238, 236), "gray": (128, 128, 130), "black": (30, 30, 34), "beige": (212, 200, 176)}
TEXTURES = ("plain", "gradient", "grainy")

# Center of an object (x, y) as a fraction of the image's width and height, from the top left.
POSITIONS = {
    "top left": (0.25, 0.25), "top": (0.50, 0.25), "top right": (0.75, 0.25),
    "left": (0.25, 0.50), "center": (0.50, 0.50), "right": (0.75, 0.50),
    "bottom left": (0.25, 0.75), "bottom": (0.50, 0.75), "bottom right": (0.75, 0.75),
}  # fmt: skip

# Half the width of an object as a fraction of the image's width: 10 and 14 pixels wide at 32. Two large objects half an
# image apart do not touch, jitter included.
SIZES = {"small": 0.155, "large": 0.22}

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SAYABLE = ("color", "size", "position", "relation", "background")  # attributes that a caption may omit

_FRACTION: dict[str, Any] = {"least": 0, "most": 1}  # bounds
_GRADIENT = 12.0  # maximum change of brightness from the center to an edge, in levels of 255


@dataclass(frozen=True)
class SceneObject:
    """One object. x, y: its center as a fraction of the image's width and height, from the top left."""

    color: str
    shape: str
    size: str
    position: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """The complete content of an image.

    kind:     ``single`` (one object), ``pair`` (two objects that differ in color and shape) or ``count`` (2 or more
              objects of the same color, shape and size).
    relation: of a pair, the position of the first object relative to the second, a key of ``OPPOSITE``; else None.
    slope:    change of background brightness from the center to the right and to the lower edge, in levels of 255.
    grain:    random key of the background noise; used by the ``grainy`` texture only.
    """

    kind: str
    objects: tuple[SceneObject, ...]
    relation: str | None
    background: str
    texture: str
    slope: tuple[float, float]
    grain: int


@settings
class ShapesConfig:
    """Shapes world"""

    image_size: int = option(32, "image width and height in pixels, or those of an equal-area square", most=MAX_SIDE)
    aspect_ratios: tuple[str, ...] = option(
        ("1/1",), "width / height of images, such as 1/1,2/1; a ratio given twice is twice as frequent"
    )
    train_samples: int = option(16384, "captioned images in the training split", least=1)
    val_samples: int = option(512, "captioned images in the validation split, of different scenes", least=0)
    samples_per_shard: int = option(1024, "captioned images per shard", least=1)
    seed: int = option(0, "random seed; image i is a function of (seed, i)", most=MAX_SEED)
    shapes: tuple[str, ...] = option(SHAPES[:4], "shapes", SHAPES)
    new_tokens: tuple[str, ...] = option(
        (), "shapes that captions name in brackets, such as [star], as tokens that a LoRA adds"
    )
    colors: tuple[str, ...] = option(tuple(COLORS)[:6], "colors", tuple(COLORS), was=("colours",))
    sizes: tuple[str, ...] = option(
        tuple(SIZES), "object sizes; captions never name the size if there is only one", tuple(SIZES)
    )
    positions: tuple[str, ...] = option(
        ("top left", "top right", "center", "bottom left", "bottom right"),
        "positions of single objects",
        tuple(POSITIONS),
    )
    backgrounds: tuple[str, ...] = option(
        ("white", "beige"),
        "background colors; light and dark ones together slow down training, because the background then dominates the "
        "loss",
        tuple(BACKGROUNDS),
    )
    held_out: tuple[str, ...] = option(
        ("blue triangle", "green circle", "yellow square", "purple cross"),
        "held-out pairs `color shape`: absent from all images and captions, used by ShapeEval only",
    )
    pair_fraction: float = option(
        0.2, "fraction of images with two different objects in a spatial relation", **_FRACTION
    )
    count_fraction: float = option(0.05, "fraction of images with two or more identical objects", **_FRACTION)
    max_count: int = option(3, "maximum number of identical objects: 2 or 3", least=2, most=3)
    jitter: float = option(
        0.03,
        "maximum offset of an object from its position, as a fraction of the image's width; above 0.03 objects would "
        "touch",
        least=0,
        most=0.03,
    )
    plain_fraction: float = option(
        0.5, "fraction of uniform backgrounds; half of the others have a gradient, half are grainy", **_FRACTION
    )
    say_color: float = option(0.95, "probability that a caption names the color", was=("say_colour",), **_FRACTION)
    say_size: float = option(0.9, "probability that a caption names the size", **_FRACTION)
    say_position: float = option(
        0.95, "probability that the caption of a single object names its position", **_FRACTION
    )
    say_relation: float = option(0.75, "probability that the caption of a pair names the relation", **_FRACTION)
    say_background: float = option(0.5, "probability that a caption names the background", **_FRACTION)

    def faults(self) -> Iterator[Fault]:
        for name in ("shapes", "colors", "sizes", "positions", "backgrounds"):
            words = getattr(self, name)
            if not words or len(set(words)) < len(words):
                yield Fault(name, f"is {','.join(words) or 'none'}, but must have at least one entry, each once")
        for name in self.new_tokens:
            if name not in self.shapes:
                yield Fault("new_tokens", f"has {name!r}, but the {named('shapes')} are {', '.join(self.shapes)}")
        pairs = [f"{color} {shape}" for color, shape in itertools.product(self.colors, self.shapes)]
        for pair in self.held_out:
            if pair not in pairs:
                rule = f"has {pair!r}, which is not a color and a shape of this world{nearest(pair, pairs)}"
                yield Fault("held_out", rule)
        drawn = {word for pair in trained_pairs(self) for word in pair}
        for name in (*self.colors, *self.shapes):
            if name not in drawn:
                yield Fault("held_out", f"leaves nothing {name} to draw; hold out fewer pairs")
        if self.pair_fraction + self.count_fraction > 1:
            rule = f"and {named('count_fraction')} add up to more than 1; lower one of them"
            yield Fault("pair_fraction", rule)
        if self.pair_fraction and not pairs_of_pairs(self):
            yield Fault("pair_fraction", "needs objects that differ in color and shape; add some or set it to 0")
        if not self.aspect_ratios:
            yield Fault("aspect_ratios", "is none, but must have at least one ratio, such as 1/1")
        shorter = min(min(picture_size(self, text)) for text in self.aspect_ratios)
        if shorter < 16:
            ratios = f"{named('aspect_ratios')} {','.join(self.aspect_ratios)}"
            rule = f"all sides must have at least 16 pixels, and with {ratios} it makes some of {shorter}"
            yield Fault.of(self, "image_size", rule)


def picture_size(config: ShapesConfig, ratio: str) -> tuple[int, int]:
    """Height and width of the images with this ratio of the config's."""
    root = math.sqrt(parse_ratio("aspect_ratios", ratio))
    return round(config.image_size / root), round(config.image_size * root)


def scene_size(config: ShapesConfig, i: int, split: str = "train") -> tuple[int, int]:
    """Height and width of image i of a split: a function of (config, i, split)."""
    return picture_size(config, Dice(config.seed, f"shapes {split} size", i).choose(config.aspect_ratios))


@functools.lru_cache(maxsize=64)
def trained_pairs(config: ShapesConfig) -> tuple[tuple[str, str], ...]:
    """The (color, shape) pairs of the training and validation splits."""
    pairs = itertools.product(config.colors, config.shapes)
    return tuple(pair for pair in pairs if " ".join(pair) not in config.held_out)


def held_out_pairs(config: ShapesConfig) -> tuple[tuple[str, str], ...]:
    """The (color, shape) pairs reserved for evaluation."""
    by_name = {" ".join(pair): pair for pair in itertools.product(config.colors, config.shapes)}
    return tuple(by_name[name] for name in config.held_out)


@functools.lru_cache(maxsize=64)
def pairs_of_pairs(config: ShapesConfig) -> tuple[tuple[tuple[str, str], tuple[str, str]], ...]:
    """Ordered pairs of trained (color, shape) pairs that differ in color and in shape."""
    couples = itertools.permutations(trained_pairs(config), 2)
    return tuple((a, b) for a, b in couples if a[0] != b[0] and a[1] != b[1])


def _layouts(count: int) -> tuple[tuple[str, ...], ...]:
    """Sets of positions that are pairwise at least half an image apart along x or y, so that no objects touch."""

    def apart(a: str, b: str) -> bool:
        return max(abs(u - v) for u, v in zip(POSITIONS[a], POSITIONS[b], strict=True)) >= 0.5

    return tuple(
        positions
        for positions in itertools.combinations(POSITIONS, count)
        if all(apart(a, b) for a, b in itertools.combinations(positions, 2))
    )


LAYOUTS = {count: _layouts(count) for count in (2, 3)}


def relation_of(first: tuple[float, float], second: tuple[float, float]) -> str:
    """Relation of an object centered at ``first`` to one at ``second``, along the axis of their larger distance."""
    dx, dy = first[0] - second[0], first[1] - second[1]
    if abs(dx) >= abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


def _aligned(a: str, b: str) -> bool:
    """Whether two positions lie in one row or one column, half an image apart: their relation is then unambiguous."""
    in_line = any(u == v for u, v in zip(POSITIONS[a], POSITIONS[b], strict=True))
    return in_line and {a, b} in map(set, LAYOUTS[2])


# Pairs of positions by their relation.
ALIGNED = {
    relation: tuple(
        (a, b)
        for a, b in itertools.permutations(POSITIONS, 2)
        if _aligned(a, b) and relation_of(POSITIONS[a], POSITIONS[b]) == relation
    )
    for relation in OPPOSITE
}


class Dice:
    """The random numbers of one image: draw k is a function of (seed, purpose, i, k)."""

    THROWS = 32  # more than any image needs

    def __init__(self, seed: int, purpose: str, i: int):
        positions = np.arange(self.THROWS, dtype=np.uint64) + np.uint64(i * self.THROWS)
        self._values = iter(random_uniform(seed, purpose, positions).tolist())

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * next(self._values)

    def chance(self, probability: float) -> bool:
        return next(self._values) < probability

    def choose(self, options: Sequence):
        return options[int(next(self._values) * len(options))]


def place_object(dice: Dice, config: ShapesConfig, pair: tuple[str, str], size: str, position: str) -> SceneObject:
    """An object of this (color, shape) pair at a position, with jitter."""
    x, y = POSITIONS[position]
    dx, dy = (dice.uniform(-config.jitter, config.jitter) for _ in range(2))
    return SceneObject(*pair, size, position, round(x + dx, 4), round(y + dy, 4))


def place_pair(dice: Dice, config: ShapesConfig, couple: Sequence[tuple[str, str]], relation: str) -> Scene:
    """A scene of two objects, of these (color, shape) pairs, in a relation."""
    positions = dice.choose(ALIGNED[relation])
    objects = [
        place_object(dice, config, pair, dice.choose(config.sizes), position)
        for pair, position in zip(couple, positions, strict=True)
    ]
    return add_background(dice, config, "pair", objects, relation)


def add_background(
    dice: Dice, config: ShapesConfig, kind: str, objects: Sequence[SceneObject], relation: str | None = None
) -> Scene:
    """A scene of these objects on a random background."""
    texture = "plain" if dice.chance(config.plain_fraction) else dice.choose(TEXTURES[1:])
    right, down = (dice.uniform(-_GRADIENT, _GRADIENT) for _ in range(2))
    slope = (round(right, 1), round(down, 1)) if texture == "gradient" else (0.0, 0.0)
    grain = int(dice.uniform() * 2**31) if texture == "grainy" else 0
    return Scene(kind, tuple(objects), relation, dice.choose(config.backgrounds), texture, slope, grain)


def scene(config: ShapesConfig, i: int, split: str = "train") -> Scene:
    """Scene i of a split: a function of (config, i, split). It contains no held-out pair."""
    dice = Dice(config.seed, f"shapes {split}", i)
    share = dice.uniform()
    if share < config.pair_fraction:
        relation = dice.choose(tuple(OPPOSITE))
        return place_pair(dice, config, dice.choose(pairs_of_pairs(config)), relation)
    pair, size = dice.choose(trained_pairs(config)), dice.choose(config.sizes)
    if share < config.pair_fraction + config.count_fraction:
        layout = dice.choose(LAYOUTS[dice.choose(range(2, config.max_count + 1))])
        objects = [place_object(dice, config, pair, size, position) for position in layout]
        return add_background(dice, config, "count", objects)
    position = dice.choose(config.positions)
    return add_background(dice, config, "single", [place_object(dice, config, pair, size, position)])
