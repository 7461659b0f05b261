"""ShapeEval: do pictures of the shapes world show what their captions say?

Every score comes with what it has to be compared with: the same pictures under wrong captions (chance), real renders of
the prompts (ceiling), the same renders blurred and noisy, the number of prompts and a 95 % interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch.nn import functional as F

from ..errors import InputError
from ..evaluation.intervals import wilson
from .parser import Found, parse_shapes
from .prompts import ShapePrompt
from .render import render
from .scenes import relation_of

# Rows of the report: name, task whose prompts count, and what has to hold. ``correct`` is everything that is asked.
ROWS = (
    ("single object", "single object", "correct"),
    ("colour", "attributes", "colour"),
    ("shape", "attributes", "shape"),
    ("size", "attributes", "size"),
    ("position", "attributes", "position"),
    ("all attributes", "attributes", "correct"),
    ("held-out pairs", "held-out pairs", "correct"),
    ("held-out phrasing", "held-out phrasing", "correct"),
    ("two objects", "two objects", "correct"),
    ("binding", "binding", "correct"),
    ("relation", "relation", "correct"),
    ("counting", "counting", "correct"),
)
BLUR = 0.5  # pixels at 32, standard deviation, of the degraded ceiling
NOISE = 10.0  # levels of 255, standard deviation, of the degraded ceiling
_LEAST_OFFSET = 0.15  # of the picture's width, between things in a relation
_SHIFTS = 16  # wrong captions tried on each picture


@dataclass(frozen=True)
class Row:
    """Fractions in [0, 1]; low and high: 95 % interval of the score (Wilson)."""

    name: str
    n: int
    score: float
    low: float
    high: float
    chance: float
    ceiling: float
    ceiling_degraded: float


@dataclass(frozen=True)
class ShapeReport:
    """rows: one for each score; empty: fraction of pictures in which no thing was found."""

    rows: tuple[Row, ...]
    empty: float

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict:
        return {"empty": self.empty, **{row.name: asdict(row) for row in self.rows}}

    def table(self) -> str:
        """A Markdown table, readable as plain text too."""
        lines = [
            "| task              | score | 95 % interval | chance | ceiling | ceiling, degraded |   n |",
            "|-------------------|-------|---------------|--------|---------|-------------------|-----|",
        ]
        for row in self.rows:
            lines.append(
                f"| {row.name:17} | {row.score:5.3f} | {row.low:.3f} – {row.high:.3f} | {row.chance:6.3f} "
                f"| {row.ceiling:7.3f} | {row.ceiling_degraded:17.3f} | {row.n:3} |"
            )
        return "\n".join(lines)


def _agreement(prompt: ShapePrompt, found: Sequence[Found]) -> dict[str, bool]:
    """What holds when the prompt's things are these, in this order; colour, size, … whether said or not."""
    things = prompt.scene.things
    holds = {
        field: all(getattr(a, field) == getattr(b, field) for a, b in zip(things, found, strict=True))
        for field in ("shape", "colour", "size", "position")
    }
    if prompt.scene.relation:
        first, second = ((thing.x, thing.y) for thing in found)
        apart = max(abs(u - v) for u, v in zip(first, second, strict=True)) >= _LEAST_OFFSET
        holds["relation"] = apart and relation_of(first, second) == prompt.scene.relation
    return holds


def judge(prompt: ShapePrompt, found: Sequence[Found]) -> dict[str, bool]:
    """What a parsed picture has right. ``correct``: the number of things, their shapes and everything said.

    Where there are more things than asked for, the attributes are judged on those that agree best, for a single
    prompt on the one that explains most of the picture.
    """
    asked = len(prompt.scene.things)
    needed = {"shape", *prompt.said}
    if len(found) < asked:
        return dict.fromkeys([*needed, "correct"], False)
    orders = [found[:1]] if asked == 1 else itertools.permutations(found, asked)
    best = max((_agreement(prompt, order) for order in orders), key=lambda holds: sum(holds[f] for f in needed))
    judged = {field: best[field] for field in needed}
    return {**judged, "correct": len(found) == asked and all(judged.values())}


def degrade(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """Mild Gaussian blur and noise, as a good but imperfect generator leaves them. [N, H, W, 3] uint8 → same."""
    sigma = BLUR * images.shape[1] / 32
    reach = max(1, round(3 * sigma))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma).square())
    kernel /= kernel.sum()
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    padded = F.pad(values, (reach,) * 4, mode="replicate").flatten(0, 1)[:, None]
    blurred = F.conv2d(F.conv2d(padded, kernel[None, None, :, None]), kernel[None, None, None, :]).view_as(values)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    return (blurred + NOISE * noise).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def _mean(prompts: Sequence[ShapePrompt], parsed: Sequence[Sequence[Found]], key: str) -> float:
    return float(np.mean([judge(prompt, found)[key] for prompt, found in zip(prompts, parsed, strict=True)]))


def _chance(prompts: Sequence[ShapePrompt], parsed: Sequence[Sequence[Found]], key: str) -> float:
    """The score when every picture is judged by the captions of others of its task."""
    n = len(prompts)
    shifts = range(1, min(n, _SHIFTS + 1))
    return float(np.mean([_mean(prompts, [*parsed[s:], *parsed[:s]], key) for s in shifts]))


def evaluate_shapes(images: np.ndarray, prompts: Sequence[ShapePrompt]) -> ShapeReport:
    """Score pictures against the prompts they were made for.

    images: [N, H, W, 3] uint8, picture i for prompt i, square; sizes other than 32 are resized for parsing.
    Raises InputError when the numbers differ, a task has a single prompt, or the pictures are not square.
    """
    if len(images) != len(prompts):
        raise InputError(f"ShapeEval got {len(images)} pictures for {len(prompts)} prompts; give one for each")
    if images.shape[1] != images.shape[2]:
        raise InputError(f"ShapeEval judges square pictures, not {images.shape[2]}×{images.shape[1]}")
    real = np.stack([render(prompt.scene, images.shape[1]) for prompt in prompts])
    parsed, clean, degraded = (parse_shapes(pictures) for pictures in (images, real, degrade(real)))
    rows = []
    for name, task, key in ROWS:
        chosen = [i for i, prompt in enumerate(prompts) if prompt.task == task]
        if not chosen or (key != "correct" and key not in {"shape", *prompts[chosen[0]].said}):
            continue
        if len(chosen) < 2:
            raise InputError(f"ShapeEval needs at least 2 prompts of the task {task!r} to measure chance, not 1")
        mine = [prompts[i] for i in chosen]
        score, top, top_degraded = (_mean(mine, [p[i] for i in chosen], key) for p in (parsed, clean, degraded))
        chance = _chance(mine, [parsed[i] for i in chosen], key)
        low, high = wilson(score * len(mine), len(mine))
        rows.append(Row(name, len(mine), score, low, high, chance, top, top_degraded))
    return ShapeReport(tuple(rows), float(np.mean([not found for found in parsed])))
