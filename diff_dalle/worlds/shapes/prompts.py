"""Prompts for the shapes world in the task split of GenEval (Ghosh et al. 2023, arXiv 2310.11513).

GenEval's tasks are single object, two objects, counting, colors, position and color attribution. Here ``attributes``
names color, size and position of one object, ``relation`` is GenEval's position and ``binding`` its color attribution.
Two further tasks use held-out (color, shape) pairs and the held-out phrasing. To add a task: one entry in ``TASKS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...config import Fault, InputError, lookup
from ...randomness import permutation
from .captions import HELD_OUT_PHRASING, PHRASINGS, caption, phrasing_key, sayable, with_tokens
from .scenes import (
    LAYOUTS,
    OPPOSITE,
    Dice,
    Scene,
    ShapesConfig,
    add_background,
    held_out_pairs,
    pairs_of_pairs,
    place_object,
    place_pair,
    trained_pairs,
)


@dataclass(frozen=True)
class ShapePrompt:
    """A caption and the content of a correct image.

    scene: one correct image; only its shapes, its number of objects and the attributes in ``said`` are required.
    """

    text: str
    task: str
    scene: Scene
    said: frozenset[str]


@dataclass(frozen=True)
class Task:
    """kind: of scene; say: attributes named; unseen: ``pairs`` or ``phrasing``, if held out from training."""

    kind: str
    say: frozenset[str]
    unseen: str | None = None


TASKS = {
    "single object": Task("single", frozenset()),
    "attributes": Task("single", frozenset({"color", "size", "position"})),
    "held-out pairs": Task("single", frozenset({"color", "size", "position"}), unseen="pairs"),
    "held-out phrasing": Task("single", frozenset({"color", "size", "position"}), unseen="phrasing"),
    "two objects": Task("pair", frozenset()),
    "binding": Task("pair", frozenset({"color"})),
    "relation": Task("pair", frozenset({"color", "relation"})),
    "counting": Task("count", frozenset({"color"})),
}


def _scenes(config: ShapesConfig, name: str, n: int, seed: int) -> list[Scene]:
    """Of the n prompts of a task."""
    task, dice = TASKS[name], [Dice(seed, f"prompts {name}", i) for i in range(n)]

    def deal(purpose: str, options: Sequence) -> list:
        """An option for each prompt, in random order, each equally often to within one."""
        purpose = f"prompts {name} {purpose}"
        first = permutation(seed, f"{purpose} first", len(options))
        return [options[first[k % len(options)]] for k in permutation(seed, purpose, n)]

    if task.kind == "pair":
        couples = deal("pairs", pairs_of_pairs(config))
        relations = deal("relation", tuple(OPPOSITE))
        return [
            place_pair(throw, config, couple, relation)
            for throw, couple, relation in zip(dice, couples, relations, strict=True)
        ]
    pairs = deal("pairs", held_out_pairs(config) if task.unseen == "pairs" else trained_pairs(config))
    sizes = deal("size", config.sizes)
    if task.kind == "count":
        numbers = deal("number", range(2, config.max_count + 1))
        layouts = [throw.choose(LAYOUTS[number]) for throw, number in zip(dice, numbers, strict=True)]
    else:
        layouts = [(position,) for position in deal("position", config.positions)]
    scenes = []
    for throw, pair, size, layout in zip(dice, pairs, sizes, layouts, strict=True):
        objects = [place_object(throw, config, pair, size, position) for position in layout]
        scenes.append(add_background(throw, config, task.kind, objects))
    return scenes


def shape_prompts(
    n: int, seed: int = 0, config: ShapesConfig | None = None, tasks: Sequence[str] = tuple(TASKS)
) -> list[ShapePrompt]:
    """``n`` prompts per task, task after task, with every attribute equally often: a function of its arguments.

    Tasks that do not exist in this world (no held-out pairs, a single color) are omitted. Raises InputError for an
    unknown task and for n < 2 (the chance level needs captions to swap).
    """
    if n < 2:
        raise InputError(Fault("prompts_per_task", "must be at least 2, for ShapeEval's level of chance", n))
    config = config or ShapesConfig()
    prompts = []
    for name in tasks:
        task = lookup(TASKS, name, "ShapeEval task")
        if (task.unseen == "pairs" and not config.held_out) or (task.kind == "pair" and not pairs_of_pairs(config)):
            continue
        for scene in _scenes(config, name, n, seed):
            say = task.say & sayable(scene, config)
            phrasing = HELD_OUT_PHRASING if task.unseen == "phrasing" else PHRASINGS[phrasing_key(scene, say)][0]
            text = with_tokens(config, caption(scene, phrasing, say))
            prompts.append(ShapePrompt(text, name, scene, say))
    return prompts
