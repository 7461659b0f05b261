"""ShapeEval: do images of the shapes world show what their captions say?

Every score comes with its references: the same images under wrong captions (chance level), real renders of the prompts
(ceiling), the same renders with blur and noise, the number of prompts and a 95 % interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch.nn import functional as F

from ...config import InputError
from ...evaluation.intervals import wilson
from ...evaluation.report import Table
from .parser import DetectedObject, parse_shapes
from .prompts import ShapePrompt
from .render import render
from .scenes import relation_of

# Rows of the report: name, task whose prompts count, and the criterion. ``correct``: everything that the caption says.
ROWS = (
    ("single object", "single object", "correct"),
    ("color", "attributes", "color"),
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
BLUR = 0.5  # standard deviation of the degraded ceiling's blur, in pixels at 32
NOISE = 10.0  # standard deviation of the degraded ceiling's noise, in levels of 255
_MIN_OFFSET = 0.15  # minimum distance of two objects in a relation, as a fraction of the image's width
_SHIFTS = 16  # wrong captions per image for the chance level


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
    """rows: one per score; empty: fraction of images without a detected object."""

    rows: tuple[Row, ...]
    empty: float

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict:
        return {"empty": self.empty, **{row.name: asdict(row) for row in self.rows}}

    def table(self) -> Table:
        rows = []
        for row in self.rows:
            scores = f"{row.score:.3f}", f"{row.low:.3f} – {row.high:.3f}", f"{row.chance:.3f}"
            rows.append([row.name, *scores, f"{row.ceiling:.3f}", f"{row.ceiling_degraded:.3f}", row.n])
        header = ["task", "score", "95 % interval", "chance", "ceiling", "ceiling, degraded", "n"]
        return Table(header, rows)


def _agreement(prompt: ShapePrompt, detected: Sequence[DetectedObject]) -> dict[str, bool]:
    """Which attributes of the prompt's objects agree with these, in this order, named in the caption or not."""
    objects = prompt.scene.objects
    agrees = {
        field: all(getattr(a, field) == getattr(b, field) for a, b in zip(objects, detected, strict=True))
        for field in ("shape", "color", "size", "position")
    }
    if prompt.scene.relation:
        first, second = ((item.x, item.y) for item in detected)
        apart = max(abs(u - v) for u, v in zip(first, second, strict=True)) >= _MIN_OFFSET
        agrees["relation"] = apart and relation_of(first, second) == prompt.scene.relation
    return agrees


def judge(prompt: ShapePrompt, detected: Sequence[DetectedObject]) -> dict[str, bool]:
    """Which attributes of a parsed image are right. ``correct``: number of objects, shapes and everything said.

    With surplus objects, the attributes are those of the best-matching ones; for a prompt with a single object, those
    of the object that explains most of the image.
    """
    count = len(prompt.scene.objects)
    required = {"shape", *prompt.said}
    if len(detected) < count:
        return dict.fromkeys([*required, "correct"], False)
    orders = [detected[:1]] if count == 1 else itertools.permutations(detected, count)
    best = max((_agreement(prompt, order) for order in orders), key=lambda agrees: sum(agrees[f] for f in required))
    judged = {field: best[field] for field in required}
    return {**judged, "correct": len(detected) == count and all(judged.values())}


def degrade(images: np.ndarray) -> np.ndarray:
    """Mild Gaussian blur and noise, like the errors of a good generator. [N, H, W, 3] uint8 → same."""
    sigma = BLUR * min(images.shape[1:3]) / 32
    reach = max(1, round(3 * sigma))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma).square())
    kernel /= kernel.sum()
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float()
    padded = F.pad(values, (reach,) * 4, mode="replicate").flatten(0, 1)[:, None]
    blurred = F.conv2d(F.conv2d(padded, kernel[None, None, :, None]), kernel[None, None, None, :]).view_as(values)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    return (blurred + NOISE * noise).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def _mean(prompts: Sequence[ShapePrompt], parsed: Sequence[Sequence[DetectedObject]], key: str) -> float:
    return float(np.mean([judge(prompt, detected)[key] for prompt, detected in zip(prompts, parsed, strict=True)]))


def _chance(prompts: Sequence[ShapePrompt], parsed: Sequence[Sequence[DetectedObject]], key: str) -> float:
    """Mean score of the images under other captions of their task."""
    n = len(prompts)
    shifts = range(1, min(n, _SHIFTS + 1))
    return float(np.mean([_mean(prompts, [*parsed[s:], *parsed[:s]], key) for s in shifts]))


def evaluate_shapes(images: np.ndarray, prompts: Sequence[ShapePrompt]) -> ShapeReport:
    """Score images against their prompts.

    images: [N, H, W, 3] uint8, image i sampled for prompt i; resized for parsing.
    Raises InputError for different numbers of images and prompts, a task with a single prompt, and images that
    ``parse_shapes`` does not take.
    """
    if len(images) != len(prompts):
        raise InputError(f"ShapeEval got {len(images)} images for {len(prompts)} prompts; pass one image per prompt")
    size = (images.shape[1], images.shape[2])
    real = np.stack([render(prompt.scene, size) for prompt in prompts])
    parsed, clean, degraded = (parse_shapes(pixels) for pixels in (images, real, degrade(real)))
    rows = []
    for name, task, key in ROWS:
        chosen = [i for i, prompt in enumerate(prompts) if prompt.task == task]
        if not chosen or (key != "correct" and key not in {"shape", *prompts[chosen[0]].said}):
            continue
        if len(chosen) < 2:
            raise InputError(f"ShapeEval needs at least 2 prompts of the task {task!r} for the chance level, not 1")
        own = [prompts[i] for i in chosen]
        score, top, top_degraded = (_mean(own, [p[i] for i in chosen], key) for p in (parsed, clean, degraded))
        chance = _chance(own, [parsed[i] for i in chosen], key)
        low, high = wilson(score * len(own), len(own))
        rows.append(Row(name, len(own), score, low, high, chance, top, top_degraded))
    return ShapeReport(tuple(rows), float(np.mean([not detected for detected in parsed])))
