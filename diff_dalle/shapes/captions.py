"""Captions of the shapes world: a grammar with several phrasings, of which one is kept for evaluation.

What a caption says is always true of its scene; it need not say everything. To add a phrasing: one line in
``PHRASINGS``.
"""

from __future__ import annotations

from collections.abc import Collection

from .scenes import OPPOSITE, SAYABLE, Dice, Scene, ShapesConfig, Thing

# By what the caption tells: {a}, {b} things with their article, {where} a position, {relation} how a lies to b,
# {many} a number and a plural, {shape} a bare noun, {looks} its adjectives joined by "and".
PHRASINGS = {
    "single": ("{a}", "a picture of {a}", "there is {a}"),
    "single, position": (
        "{a} {where}",
        "a picture of {a} {where}",
        "there is {a} {where}",
        "{where} there is {a}",
        "{where} is {a}",
    ),
    "pair": ("{a} and {b}", "a picture of {a} and {b}", "there is {a} and {b}"),
    "pair, relation": ("{a} {relation} {b}", "a picture of {a} {relation} {b}", "there is {a} {relation} {b}"),
    "count": ("{many}", "a picture of {many}", "there are {many}"),
}
HELD_OUT_PHRASING = "the {shape} {where} is {looks}"  # every word of it is known from other phrasings

_WHERE = {"top": "at the top", "bottom": "at the bottom", "left": "on the left", "right": "on the right"}
# The first is the plain form, which evaluation uses.
_RELATIONS = {
    "left of": ("to the left of", "left of"),
    "right of": ("to the right of", "right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
_NUMBERS = {2: "two", 3: "three"}


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def _adjectives(thing: Thing, say: Collection[str]) -> list[str]:
    return [word for field, word in (("size", thing.size), ("colour", thing.colour)) if field in say]


def _with_article(thing: Thing, say: Collection[str]) -> str:
    words = " ".join([*_adjectives(thing, say), thing.shape])
    return ("an " if words[0] in "aeiou" else "a ") + words


def sayable(scene: Scene, config: ShapesConfig) -> frozenset[str]:
    """Attributes that a caption of this scene can name: those that exist in it and of which there is a choice."""
    can = {"colour", "background"}
    if scene.kind == "single":
        can.add("position")
    if scene.kind == "pair":
        can.add("relation")
    if len(config.sizes) > 1:
        can.add("size")
    return frozenset(can)


def phrasing_key(scene: Scene, say: Collection[str]) -> str:
    """The entry of ``PHRASINGS`` for a scene when the attributes in ``say`` are to be named."""
    told = [field for field in ("position", "relation") if field in say]
    return ", ".join([scene.kind, *told])


def caption(scene: Scene, phrasing: str, say: Collection[str], swap: bool = False, variant: int = 0) -> str:
    """A caption.

    phrasing: a template that fits ``phrasing_key(scene, say)``.
    say:      what is named, of ``sayable``; shapes always are.
    swap:     name the second thing of a pair first, with the opposite relation.
    variant:  which of the words for a relation.
    """
    things, relation = scene.things, scene.relation
    if swap and relation:
        things, relation = things[::-1], OPPOSITE[relation]
    first, last = things[0], things[-1]
    adjectives = _adjectives(first, say)
    words = _RELATIONS.get(relation, ("",))
    text = phrasing.format(
        a=_with_article(first, say),
        b=_with_article(last, say),
        shape=first.shape,
        looks=" and ".join(adjectives),
        many=" ".join([_NUMBERS.get(len(things), ""), *adjectives, plural(first.shape)]),
        where=_WHERE.get(first.position, f"in the {first.position}"),
        relation=words[variant % len(words)],
    )
    return f"{text} on a {scene.background} background" if "background" in say else text


def training_caption(config: ShapesConfig, scene: Scene, i: int, split: str = "train") -> str:
    """The caption of scene number i of a split: a pure function of its arguments; never the held-out phrasing."""
    dice = Dice(config.seed, f"captions {split}", i)
    can = sayable(scene, config)
    said = [field for field in SAYABLE if dice.chance(getattr(config, f"say_{field}")) and field in can]
    phrasing = dice.choose(PHRASINGS[phrasing_key(scene, said)])
    return caption(scene, phrasing, said, swap=dice.chance(0.5), variant=dice.choose((0, 1)))
