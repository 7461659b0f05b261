"""Variations of pictures of the shapes world: do they keep what the embedding of a picture says about it?

The score of an attribute is that of ShapeEval, with the picture's own content in place of a caption's. Beside it stands
what a linear probe reads from the same embeddings: a decoder cannot show what they do not carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..evaluation.intervals import wilson
from ..evaluation.linear_probe import linear_probe
from ..evaluation.report import Section, markdown_table
from ..images.grid import image_grid
from .prompts import ShapePrompt
from .scenes import Scene, ShapesConfig, scene
from .shape_eval import ShapeReport

TASKS = ("attributes", "held-out pairs")  # pictures of a single object; the latter of pairs never seen in training
ATTRIBUTES = ("color", "position", "size", "shape")
PROBE_SCENES = 2000  # from whose embeddings the probes learn
GRID_COLUMNS = 10  # pictures in the grid
CARRIED = 0.5  # share of the way from chance to 1 above which a probe's score says that an attribute is carried

EXPLANATION = """
Each variation is sampled from the embedding of a picture that was not trained on. *Score*: the attribute, judged from
the variation's pixels, is the picture's; the last two rows: number of objects and all attributes are, for pairs of
color and shape that training has seen, and that it has not. *Chance*: the same variations scored against other
pictures. *Probe*: a logistic regression reads the attribute from the embedding: what the CLIP carries, and so about
the most that a decoder can show. 95 % Wilson intervals.
"""


@dataclass(frozen=True)
class VariationRow:
    """Fractions in [0, 1]; low and high: 95 % interval of the score; probe: None for rows that no probe answers."""

    name: str
    n: int
    score: float
    low: float
    high: float
    chance: float
    probe: float | None


def probe_scenes(config: ShapesConfig, count: int = PROBE_SCENES) -> list[Scene]:
    """The first ``count`` scenes of the training split with a single object; fewer if that split has fewer."""
    found = (scene(config, i) for i in range(config.train_samples))
    chosen: list[Scene] = []
    for each in found:
        if each.kind == "single":
            chosen.append(each)
        if len(chosen) == count:
            break
    return chosen


def probe_scores(
    features: Tensor, scenes: Sequence[Scene], queries: Tensor, prompts: Sequence[ShapePrompt]
) -> dict[str, float]:
    """For each attribute, the share of prompts of the task ``attributes`` where a probe reads the scene's from its
    embedding.

    features: [N, E] embeddings of pictures of ``scenes``, for the probes to learn from. queries: [M, E] embeddings of
    pictures of the prompts' scenes.
    """
    asked = [i for i, prompt in enumerate(prompts) if prompt.task == TASKS[0]]
    scores = {}
    for name in ATTRIBUTES:
        found = linear_probe(features, [getattr(each.objects[0], name) for each in scenes], queries[asked])
        truth = [getattr(prompts[i].scene.objects[0], name) for i in asked]
        scores[name] = float(np.mean([a == b for a, b in zip(found, truth, strict=True)]))
    return scores


def variation_rows(report: ShapeReport, probes: dict[str, float]) -> list[VariationRow]:
    """The rows of the table. report: of the variations against the pictures; probes: of ``probe_scores``."""
    rows = []
    for name in (*ATTRIBUTES, "all attributes", "held-out pairs"):
        found = [row for row in report.rows if row.name == name]
        rows += [
            VariationRow(name, row.n, row.score, *wilson(row.score * row.n, row.n), row.chance, probes.get(name))
            for row in found
        ]
    return rows


def variation_table(rows: Sequence[VariationRow]) -> str:
    """A Markdown table, and a sentence for the attributes that the embedding does not carry."""
    cells = [
        [
            row.name,
            f"{row.score:.2f}",
            f"{row.low:.2f} – {row.high:.2f}",
            f"{row.chance:.2f}",
            "" if row.probe is None else f"{row.probe:.2f}",
            row.n,
        ]
        for row in rows
    ]
    table = markdown_table(("attribute", "score", "95 % interval", "chance", "probe", "n"), cells)
    lost = [row.name for row in rows if row.probe is not None and row.probe < row.chance + CARRIED * (1 - row.chance)]
    note = f"\n\nThe embedding hardly carries {' and '.join(lost)}: look at the CLIP first." if lost else ""
    return table + note


def variation_section(
    rows: Sequence[VariationRow], pictures: np.ndarray, small: np.ndarray | None, variations: np.ndarray
) -> Section:
    """The table and a grid of pictures above their variations, all uint8 [N, H, W, 3].

    small: those of the first U-Net, shown between both; None = there is one U-Net only.
    """
    chosen = np.linspace(0, len(pictures), GRID_COLUMNS, endpoint=False).astype(int)
    side = variations.shape[1]
    shown = [
        pictures,
        *([] if small is None else [small.repeat(side // small.shape[1], 1).repeat(side // small.shape[2], 2)]),
        variations,
    ]
    names = "pictures, " + ("" if small is None else "variations of the first U-Net, ") + "variations"
    grid = image_grid(np.concatenate([images[chosen] for images in shown]), columns=len(chosen))
    text = f"{EXPLANATION}\n{variation_table(rows)}\n\nRows of the grid: {names}."
    return Section("Image variations", text, grid, "image_variations.png")
