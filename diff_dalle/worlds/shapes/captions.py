"""Captions of the shapes world: a grammar with several phrasings, one of which is held out for evaluation.

Every statement of a caption is true of its scene; a caption may omit attributes. To add a phrasing: one line in
``PHRASINGS``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .scenes import OPPOSITE, SAYABLE, Dice, Scene, SceneObject, ShapesConfig

# By scene kind and the attributes named. {a}, {b}: objects with their article; {where}: a position; {relation}: that of
# a to b; {many}: a number and a plural; {shape}: a bare noun; {looks}: its adjectives joined by "and".
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
HELD_OUT_PHRASING = "the {shape} {where} is {looks}"  # all of its words occur in other phrasings

_WHERE = {"top": "at the top", "bottom": "at the bottom", "left": "on the left", "right": "on the right"}
# Evaluation uses the first form.
_RELATIONS = {
    "left of": ("to the left of", "left of"),
    "right of": ("to the right of", "right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
_NUMBERS = {2: "two", 3: "three"}


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def _adjectives(item: SceneObject, say: Collection[str]) -> list[str]:
    return [word for field, word in (("size", item.size), ("color", item.color)) if field in say]


def _with_article(item: SceneObject, say: Collection[str]) -> str:
    words = " ".join([*_adjectives(item, say), item.shape])
    return ("an " if words[0] in "aeiou" else "a ") + words


def sayable(scene: Scene, config: ShapesConfig) -> frozenset[str]:
    """Attributes that a caption of this scene can name: those that apply to it and of which the world has several."""
    attributes = {"color", "background"}
    if scene.kind == "single":
        attributes.add("position")
    if scene.kind == "pair":
        attributes.add("relation")
    if len(config.sizes) > 1:
        attributes.add("size")
    return frozenset(attributes)


def phrasing_key(scene: Scene, say: Collection[str]) -> str:
    """The entry of ``PHRASINGS`` for a scene and the attributes to name."""
    return ", ".join([scene.kind, *(field for field in ("position", "relation") if field in say)])


def caption(scene: Scene, phrasing: str, say: Collection[str], swap: bool = False, variant: int = 0) -> str:
    """A caption.

    phrasing: a template of ``PHRASINGS[phrasing_key(scene, say)]``.
    say:      attributes to name, of ``sayable``; the shapes are always named.
    swap:     name the second object of a pair first, with the opposite relation.
    variant:  index of the wording of the relation.
    """
    objects, relation = scene.objects, scene.relation
    if swap and relation:
        objects, relation = objects[::-1], OPPOSITE[relation]
    first, last = objects[0], objects[-1]
    adjectives = _adjectives(first, say)
    wordings = _RELATIONS[relation] if relation else ("",)
    text = phrasing.format(
        a=_with_article(first, say),
        b=_with_article(last, say),
        shape=first.shape,
        looks=" and ".join(adjectives),
        many=" ".join([_NUMBERS.get(len(objects), ""), *adjectives, plural(first.shape)]),
        where=_WHERE.get(first.position, f"in the {first.position}"),
        relation=wordings[variant % len(wordings)],
    )
    return f"{text} on a {scene.background} background" if "background" in say else text


def with_tokens(config: ShapesConfig, text: str) -> str:
    """A caption with the names of ``config.new_tokens`` in brackets."""
    for name in config.new_tokens:
        text = re.sub(rf"\b{name}", f"[{name}]", text)
    return text


def training_caption(config: ShapesConfig, scene: Scene, i: int, split: str = "train") -> str:
    """The caption of scene i of a split: a function of its arguments. It never uses the held-out phrasing."""
    dice = Dice(config.seed, f"captions {split}", i)
    attributes = sayable(scene, config)
    say = [field for field in SAYABLE if dice.chance(getattr(config, f"say_{field}")) and field in attributes]
    phrasing = dice.choose(PHRASINGS[phrasing_key(scene, say)])
    return with_tokens(config, caption(scene, phrasing, say, swap=dice.chance(0.5), variant=dice.choose((0, 1))))
