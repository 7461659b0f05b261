"""Prompts for the shapes world in the task split of GenEval (Ghosh et al. 2023, arXiv 2310.11513).

GenEval's tasks are single object, two objects, counting, colours, position and colour attribution. Here ``attributes``
asks for colour, size and position of one thing at once, ``relation`` is GenEval's position and ``binding`` its colour
attribution; two tasks ask for what training never showed. To add a task: one entry in ``TASKS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import lookup
from ..errors import InputError
from ..randomness import permutation
from .captions import HELD_OUT_PHRASING, PHRASINGS, caption, phrasing_key, sayable
from .scenes import (
    ALIGNED,
    LAYOUTS,
    OPPOSITE,
    Dice,
    Scene,
    ShapesConfig,
    held_out_pairs,
    pairs_of_pairs,
    place,
    surround,
    trained_pairs,
)


@dataclass(frozen=True)
class ShapePrompt:
    """A caption and what a right picture shows.

    scene: one right picture; only its shapes, the number of its things and the attributes in ``said`` are asked for.
    """

    text: str
    task: str
    scene: Scene
    said: frozenset[str]


@dataclass(frozen=True)
class Task:
    """kind: of scene; say: the attributes named; unseen: ``pairs`` or ``phrasing`` that training never showed."""

    kind: str
    say: frozenset[str]
    unseen: str | None = None


TASKS = {
    "single object": Task("single", frozenset()),
    "attributes": Task("single", frozenset({"colour", "size", "position"})),
    "held-out pairs": Task("single", frozenset({"colour", "size", "position"}), unseen="pairs"),
    "held-out phrasing": Task("single", frozenset({"colour", "size", "position"}), unseen="phrasing"),
    "two objects": Task("pair", frozenset()),
    "binding": Task("pair", frozenset({"colour"})),
    "relation": Task("pair", frozenset({"colour", "relation"})),
    "counting": Task("count", frozenset({"colour"})),
}


class _Deck:
    """Options dealt to n prompts so that each comes up equally often, give or take one, in random order."""

    def __init__(self, seed: int, task: str, n: int):
        self.seed, self.task, self.n = seed, task, n

    def deal(self, purpose: str, options: Sequence) -> list:
        purpose = f"prompts {self.task} {purpose}"
        first = permutation(self.seed, f"{purpose} first", len(options))
        order = permutation(self.seed, purpose, self.n)
        return [options[first[k % len(options)]] for k in order]


def _scenes(config: ShapesConfig, task: Task, deck: _Deck, dice: list[Dice]) -> list[Scene]:
    if task.kind == "pair":
        couples = deck.deal("pairs", pairs_of_pairs(config))
        relations = deck.deal("relation", tuple(OPPOSITE))
        scenes = []
        for throw, couple, relation in zip(dice, couples, relations, strict=True):
            where = throw.choose(ALIGNED[relation])
            things = [
                place(throw, config, pair, throw.choose(config.sizes), position)
                for pair, position in zip(couple, where, strict=True)
            ]
            scenes.append(surround(throw, config, "pair", things, relation))
        return scenes
    pairs = deck.deal("pairs", held_out_pairs(config) if task.unseen == "pairs" else trained_pairs(config))
    sizes = deck.deal("size", config.sizes)
    if task.kind == "count":
        numbers = deck.deal("number", range(2, config.max_count + 1))
        layouts = [throw.choose(LAYOUTS[number]) for throw, number in zip(dice, numbers, strict=True)]
    else:
        layouts = [(position,) for position in deck.deal("position", config.positions)]
    return [
        surround(throw, config, task.kind, [place(throw, config, pair, size, where) for where in layout])
        for throw, pair, size, layout in zip(dice, pairs, sizes, layouts, strict=True)
    ]


def shape_prompts(
    n: int, seed: int = 0, config: ShapesConfig | None = None, tasks: Sequence[str] = tuple(TASKS)
) -> list[ShapePrompt]:
    """``n`` prompts for each task, task after task, every attribute equally often: a pure function of its arguments.

    Tasks that the world cannot pose (no pair held out, a single colour) are left out. Raises InputError for an
    unknown task or n < 2 (chance needs captions to swap).
    """
    if n < 2:
        raise InputError(f"ShapeEval needs at least 2 prompts a task, not {n}")
    config = config or ShapesConfig()
    prompts = []
    for name in tasks:
        task = lookup(TASKS, name, "ShapeEval task")
        if (task.unseen == "pairs" and not config.held_out) or (task.kind == "pair" and not pairs_of_pairs(config)):
            continue
        dice = [Dice(seed, f"prompts {name}", i) for i in range(n)]
        for scene in _scenes(config, task, _Deck(seed, name, n), dice):
            say = task.say & sayable(scene, config)
            known = HELD_OUT_PHRASING if task.unseen == "phrasing" else PHRASINGS[phrasing_key(scene, say)][0]
            prompts.append(ShapePrompt(caption(scene, known, say), name, scene, say))
    return prompts
