"""The effect of guidance: the same captions sampled without guidance, with classifier-free guidance, guided by a noised
CLIP, and with both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..images.grid import image_grid
from .plots import line_plot
from .report import Section, markdown_table

GRID_COLUMNS = 8  # images per guidance setting in the grid


@dataclass(frozen=True)
class GuidanceSetting:
    """guidance_scale: classifier-free guidance, 1 = off. classifier_scale: noised-CLIP guidance, 0 = off.
    text_conditional: whether the generator is conditioned on the caption, or only the classifier reads it."""

    guidance_scale: float
    classifier_scale: float
    text_conditional: bool = True

    @property
    def name(self) -> str:
        parts = [] if self.text_conditional else ["text-unconditional"]
        parts += [f"classifier-free {self.guidance_scale:g}"] if self.guidance_scale != 1 else []
        parts += [f"noised CLIP {self.classifier_scale:g}"] if self.classifier_scale != 0 else []
        return " + ".join(parts) or "none"


@dataclass(frozen=True)
class Score:
    """A fraction in [0, 1] of n images with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int


def guidance_settings(
    guidance_scale: float, classifier_scales: Sequence[float], reads_text: bool
) -> list[GuidanceSetting]:
    """All combinations of the classifier scales and 0 with: no classifier-free guidance, classifier-free guidance, and
    (if the generator reads text) a text-unconditional generator."""
    scales = sorted({0.0, *classifier_scales})
    bases = [(free, True) for free in dict.fromkeys((1.0, guidance_scale))] + [(1.0, False)] * reads_text
    return [GuidanceSetting(free, scale, conditional) for free, conditional in bases for scale in scales]


def guidance_sections(
    text: str,
    scores: dict[GuidanceSetting, Score],
    images: dict[GuidanceSetting, np.ndarray],
    captions: Sequence[str],
) -> list[Section]:
    """A table, a plot of the score over the classifier scale, and a grid of the first images of every setting.

    text: what the score is; images: uint8 [N, H, W, 3] by setting, image i sampled for captions[i].
    """
    title = "Effect of guidance"
    rows = [[setting.name, f"{s.value:.3f}", f"{s.low:.3f} – {s.high:.3f}", s.n] for setting, s in scores.items()]
    table = markdown_table(["guidance", "score", "95 % interval", "n"], rows)
    curves: dict[str, list[tuple[float, ...]]] = {}
    for setting, s in scores.items():
        name = replace(setting, classifier_scale=0.0).name
        curves.setdefault(name, []).append((setting.classifier_scale, s.value, s.low, s.high))
    plot = line_plot(curves, "noised-CLIP guidance scale (0 = off)", "score")
    columns = min(GRID_COLUMNS, len(captions))
    cells = np.concatenate([sampled[:columns] for sampled in images.values()])
    grid = image_grid(cells, _labels(list(images), captions[:columns]), columns)
    rows_text = "One row per setting, with the same captions and noise."
    return [
        Section(title, f"{text}\n\n{table}", plot, "guidance.png"),
        Section(f"{title}: samples", rows_text, grid, "guidance_grid.png"),
    ]


def _labels(settings: Sequence[GuidanceSetting], captions: Sequence[str]) -> list[str]:
    """Setting names in the first column, captions in the first row."""
    labels = []
    for row, setting in enumerate(settings):
        for column, caption in enumerate(captions):
            parts = [f"[{setting.name}]"] if column == 0 else []
            labels.append(" ".join([*parts, caption] if row == 0 else parts))
    return labels


def scores_to_dict(scores: dict[GuidanceSetting, Score]) -> list[dict]:
    """For JSON."""
    return [{**asdict(setting), **asdict(score)} for setting, score in scores.items()]
