"""The shapes world: scenes of coloured shapes, drawn from a seed by index.

A small world whose pictures and captions are known exactly, so that a text-to-image model can be trained on a laptop
and its pictures judged attribute by attribute. ``scene`` decides what is in picture number i,
``shapes_render.render`` draws it, ``shapes_captions`` describes it, ``shapes_shards.write_shapes`` packs both.

To add a shape: one outline in ``shapes_render.OUTLINES`` and its name in ``SHAPES``. A colour, a background, a
position: one line in the table below. Everything else, the scorer included, follows from the tables.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import nearest, option
from ..errors import InputError
from ..randomness import random_uniform

SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")

# sRGB, 0..255. Far apart, and saturated where the backgrounds are not: no two entries of the two tables are closer
# than 100 levels (Euclidean), ten times the noise under which the scorer must still tell them apart.
COLOURS = {
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

# Centre of an object, as a fraction of the picture's width and height, from the top left.
POSITIONS = {
    "top left": (0.25, 0.25), "top": (0.50, 0.25), "top right": (0.75, 0.25),
    "left": (0.25, 0.50), "center": (0.50, 0.50), "right": (0.75, 0.50),
    "bottom left": (0.25, 0.75), "bottom": (0.50, 0.75), "bottom right": (0.75, 0.75),
}  # fmt: skip

# Half the width of an object, as a fraction of the picture's: 10 and 14 pixels wide at 32. Two large ones half a
# picture apart do not touch, jitter included.
SIZES = {"small": 0.155, "large": 0.22}

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SAYABLE = ("colour", "size", "position", "relation", "background")  # what a caption may leave out

_GRADIENT = 12.0  # largest change of brightness from centre to edge of a gradient, in levels of 255


@dataclass(frozen=True)
class Thing:
    """One object. x, y: its centre as a fraction of the picture, from the top left."""

    colour: str
    shape: str
    size: str
    position: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """What is in a picture, completely.

    kind:     ``single`` (one thing), ``pair`` (two, differing in colour and shape), ``count`` (2 or more alike).
    relation: of a pair, how the first thing lies to the second; a key of ``OPPOSITE``. Else None.
    slope:    change of background brightness from the centre to the right and to the lower edge, in levels of 255.
    grain:    key of the background's noise; used by the ``grainy`` texture only.
    """

    kind: str
    things: tuple[Thing, ...]
    relation: str | None
    background: str
    texture: str
    slope: tuple[float, float]
    grain: int


@dataclass(frozen=True)
class ShapesConfig:
    """Shapes world"""

    image_size: int = option(32, "width and height of the pictures in pixels")
    train_samples: int = option(16384, "captioned pictures to train on")
    val_samples: int = option(512, "captioned pictures held back for validation, from other scenes")
    samples_per_shard: int = option(1024, "captioned pictures in one tar")
    seed: int = option(0, "picture i follows from (seed, i) alone")
    shapes: tuple[str, ...] = option(SHAPES[:4], f"shapes to draw, of {', '.join(SHAPES)}")
    colours: tuple[str, ...] = option(tuple(COLOURS)[:6], f"colours to draw, of {', '.join(COLOURS)}")
    sizes: tuple[str, ...] = option(tuple(SIZES), f"sizes to draw, of {', '.join(SIZES)}; a single one is never named")
    positions: tuple[str, ...] = option(
        ("top left", "top right", "center", "bottom left", "bottom right"),
        f"where a lone thing may be, of {', '.join(POSITIONS)}",
    )
    backgrounds: tuple[str, ...] = option(
        ("white", "beige"), f"tones behind, of {', '.join(BACKGROUNDS)}; light and dark ones together are hard to "
        "learn: the tone of all pixels then outweighs everything else")  # fmt: skip
    held_out: tuple[str, ...] = option(
        ("blue triangle", "green circle", "yellow square", "purple cross"),
        "`colour shape` pairs that are never drawn nor named, kept for evaluation",
    )
    pair_fraction: float = option(0.2, "fraction of pictures with two different things in a relation")
    count_fraction: float = option(0.05, "fraction of pictures with two or more things alike")
    max_count: int = option(3, "largest number of things alike, 2 or 3")
    jitter: float = option(0.03, "largest shift of a thing off its position, as a fraction of the picture's width")
    plain_fraction: float = option(
        0.5, "fraction of backgrounds in one flat tone; the others are half gradient, half grainy"
    )
    say_colour: float = option(0.95, "probability that a caption names the colour")
    say_size: float = option(0.9, "probability that a caption names the size")
    say_position: float = option(0.95, "probability that a caption says where a lone thing is")
    say_relation: float = option(0.75, "probability that a caption says how a pair lies")
    say_background: float = option(0.5, "probability that a caption names the background")

    def __post_init__(self):
        _check_names(self)
        _check_held_out(self)
        _check_numbers(self)


def _check_names(config: ShapesConfig) -> None:
    tables = {"shapes": SHAPES, "colours": COLOURS, "sizes": SIZES, "positions": POSITIONS, "backgrounds": BACKGROUNDS}
    for field, table in tables.items():
        names = getattr(config, field)
        if not names or len(set(names)) < len(names):
            raise InputError(f"--{field} must name at least one entry, each once, not {','.join(names) or 'none'}")
        for name in names:
            if name not in table:
                raise InputError(f"--{field} has no {name!r}{nearest(name, table)} (known: {', '.join(table)})")


def _check_held_out(config: ShapesConfig) -> None:
    pairs = [f"{colour} {shape}" for colour, shape in itertools.product(config.colours, config.shapes)]
    for pair in config.held_out:
        if pair not in pairs:
            raise InputError(f"--held_out {pair!r} is not a colour and a shape of this world{nearest(pair, pairs)}")
    drawn = {word for pair in trained_pairs(config) for word in pair}
    for name in (*config.colours, *config.shapes):
        if name not in drawn:
            raise InputError(f"--held_out leaves nothing {name} to draw; hold out fewer pairs")


def _check_numbers(config: ShapesConfig) -> None:
    for field in ("pair_fraction", "count_fraction", "plain_fraction", *(f"say_{field}" for field in SAYABLE)):
        if not 0 <= getattr(config, field) <= 1:
            raise InputError(f"--{field} must lie between 0 and 1, not {getattr(config, field)}")
    if config.pair_fraction + config.count_fraction > 1:
        raise InputError("--pair_fraction and --count_fraction add up to more than 1; lower one of them")
    if config.pair_fraction and not pairs_of_pairs(config):
        raise InputError("--pair_fraction needs things that differ in colour and shape; add some or set it to 0")
    if config.max_count not in LAYOUTS:
        raise InputError(f"--max_count must be 2 or 3, not {config.max_count}")
    if not 0 <= config.jitter <= 0.03:
        raise InputError(f"--jitter must lie between 0 and 0.03, or things would touch, not {config.jitter}")
    for field, least in (("image_size", 16), ("train_samples", 1), ("val_samples", 0), ("samples_per_shard", 1)):
        if getattr(config, field) < least:
            raise InputError(f"--{field} must be at least {least}, not {getattr(config, field)}")


@functools.lru_cache(maxsize=64)
def trained_pairs(config: ShapesConfig) -> tuple[tuple[str, str], ...]:
    """The (colour, shape) pairs that are drawn for training and validation."""
    every = itertools.product(config.colours, config.shapes)
    return tuple(pair for pair in every if " ".join(pair) not in config.held_out)


def held_out_pairs(config: ShapesConfig) -> tuple[tuple[str, str], ...]:
    """The (colour, shape) pairs kept for evaluation."""
    return tuple(tuple(pair.split()) for pair in config.held_out)


@functools.lru_cache(maxsize=64)
def pairs_of_pairs(config: ShapesConfig) -> tuple:
    """Ordered couples of trained pairs that differ in colour and in shape."""
    couples = itertools.permutations(trained_pairs(config), 2)
    return tuple((a, b) for a, b in couples if a[0] != b[0] and a[1] != b[1])


def _layouts(count: int) -> tuple[tuple[str, ...], ...]:
    """Sets of positions that are pairwise half a picture apart along x or y, so that nothing touches."""

    def apart(a: str, b: str) -> bool:
        return max(abs(u - v) for u, v in zip(POSITIONS[a], POSITIONS[b], strict=True)) >= 0.5

    return tuple(
        chosen for chosen in itertools.combinations(POSITIONS, count)
        if all(apart(a, b) for a, b in itertools.combinations(chosen, 2))
    )  # fmt: skip


LAYOUTS = {count: _layouts(count) for count in (2, 3)}


def relation_of(first: tuple[float, float], second: tuple[float, float]) -> str:
    """How a thing centred at ``first`` lies to one at ``second``: along the axis on which they are further apart."""
    dx, dy = first[0] - second[0], first[1] - second[1]
    if abs(dx) >= abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"


# Couples in one row or one column: how they lie is then beyond doubt.
ALIGNED = {
    relation: tuple(
        (a, b) for a, b in itertools.permutations(POSITIONS, 2)
        if {a, b} in map(set, LAYOUTS[2]) and any(u == v for u, v in zip(POSITIONS[a], POSITIONS[b], strict=True))
        and relation_of(POSITIONS[a], POSITIONS[b]) == relation
    )
    for relation in OPPOSITE
}  # fmt: skip


class Dice:
    """A short run of random numbers that belongs to one picture: the k-th throw depends on (seed, purpose, i, k)."""

    THROWS = 32  # more than any picture needs

    def __init__(self, seed: int, purpose: str, i: int):
        positions = np.arange(self.THROWS, dtype=np.uint64) + np.uint64(i * self.THROWS)
        self._values = iter(random_uniform(seed, purpose, positions).tolist())

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * next(self._values)

    def chance(self, probability: float) -> bool:
        return next(self._values) < probability

    def choose(self, options: Sequence):
        return options[int(next(self._values) * len(options))]


def place(dice: Dice, config: ShapesConfig, pair: tuple[str, str], size: str, position: str) -> Thing:
    """A thing near a position."""
    x, y = POSITIONS[position]
    dx, dy = (dice.uniform(-config.jitter, config.jitter) for _ in range(2))
    return Thing(*pair, size, position, round(x + dx, 4), round(y + dy, 4))


def surround(
    dice: Dice, config: ShapesConfig, kind: str, things: Sequence[Thing], relation: str | None = None
) -> Scene:
    """Things on a random background."""
    texture = "plain" if dice.chance(config.plain_fraction) else dice.choose(TEXTURES[1:])
    steepness = (dice.uniform(-_GRADIENT, _GRADIENT) for _ in range(2))
    slope = tuple(round(s, 1) if texture == "gradient" else 0.0 for s in steepness)
    grain = int(dice.uniform() * 2**31) if texture == "grainy" else 0
    return Scene(kind, tuple(things), relation, dice.choose(config.backgrounds), texture, slope, grain)


def scene(config: ShapesConfig, i: int, split: str = "train") -> Scene:
    """Scene number i of a split: a pure function of (config, i, split). Never holds a held-out pair."""
    dice = Dice(config.seed, f"shapes {split}", i)
    share = dice.uniform()
    if share < config.pair_fraction:
        relation = dice.choose(tuple(OPPOSITE))
        couple, where = dice.choose(pairs_of_pairs(config)), dice.choose(ALIGNED[relation])
        things = [
            place(dice, config, pair, dice.choose(config.sizes), position)
            for pair, position in zip(couple, where, strict=True)
        ]
        return surround(dice, config, "pair", things, relation)
    pair, size = dice.choose(trained_pairs(config)), dice.choose(config.sizes)
    if share < config.pair_fraction + config.count_fraction:
        layout = dice.choose(LAYOUTS[dice.choose(range(2, config.max_count + 1))])
        return surround(dice, config, "count", [place(dice, config, pair, size, where) for where in layout])
    return surround(dice, config, "single", [place(dice, config, pair, size, dice.choose(config.positions))])
