"""What guidance adds: the same captions drawn without it, with classifier-free guidance, a noised CLIP, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..images.grid import image_grid
from .report import Section, line_plot, markdown_table

SHOWN = 8  # pictures of each way in the grid
SCREEN_SIDE = 64  # screen pixels up to which small pictures are enlarged


@dataclass(frozen=True)
class Way:
    """A way of guiding. guidance_scale: classifier-free, 1 = off; classifier_scale: the noised CLIP's, 0 = off; told:
    whether the generator gets the caption too, which else only the classifier knows."""

    guidance_scale: float
    classifier_scale: float
    told: bool = True

    @property
    def name(self) -> str:
        parts = [] if self.told else ["caption not told"]
        parts += [f"classifier-free {self.guidance_scale:g}"] if self.guidance_scale != 1 else []
        parts += [f"noised CLIP {self.classifier_scale:g}"] if self.classifier_scale != 0 else []
        return " + ".join(parts) or "none"


@dataclass(frozen=True)
class Score:
    """A fraction in [0, 1] with its 95 % interval, of n pictures."""

    value: float
    low: float
    high: float
    n: int


def ways(guidance_scale: float, classifier_scales: Sequence[float], reads_text: bool) -> list[Way]:
    """The classifier, off and at each of its scales, combined with classifier-free guidance, off and at its scale, and
    with a generator that is not told the caption (if it reads text at all)."""
    scales = sorted({0.0, *classifier_scales})
    others = [(free, True) for free in dict.fromkeys((1.0, guidance_scale))] + [(1.0, False)] * reads_text
    return [Way(free, scale, told) for free, told in others for scale in scales]


def guidance_sections(
    title: str, text: str, scored: dict[Way, Score], pictures: dict[Way, np.ndarray], captions: Sequence[str]
) -> list[Section]:
    """A table and a curve of the scores over the classifier's scale, and the first pictures of every way.

    pictures: by way, uint8 [N, H, W, 3], picture i for captions[i].
    """
    rows = [[way.name, f"{s.value:.3f}", f"{s.low:.3f} – {s.high:.3f}", s.n] for way, s in scored.items()]
    table = markdown_table(["guidance", "score", "95 % interval", "n"], rows)
    curves: dict[str, list[tuple[float, ...]]] = {}
    for way, s in scored.items():
        name = replace(way, classifier_scale=0.0).name
        curves.setdefault(name, []).append((way.classifier_scale, s.value, s.low, s.high))
    shown = min(SHOWN, len(captions))
    cells = np.concatenate([made[:shown] for made in pictures.values()])
    # The first column says which way a row is, the first row which captions were drawn.
    labels = [
        f"[{way.name}] {captions[i]}" if i == row == 0 else f"[{way.name}]" if i == 0 else "" if row else captions[i]
        for row, way in enumerate(pictures)
        for i in range(shown)
    ]
    grid = image_grid(cells, labels, shown, max(1, SCREEN_SIDE // cells.shape[1]))
    return [
        Section(title, f"{text}\n\n{table}", line_plot(curves, "scale of the noised CLIP (0 = off)"), "guidance.png"),
        Section(f"{title} Pictures", "A row for each way, the same captions and noise.", grid, "guidance_grid.png"),
    ]


def to_dict(scored: dict[Way, Score]) -> list[dict]:
    """For JSON."""
    return [{**asdict(way), **asdict(score)} for way, score in scored.items()]
