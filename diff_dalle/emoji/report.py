"""Scores of samples of held-out emoji: skin tone, name, and whether they are copies of training pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..evaluation.intervals import wilson
from ..evaluation.report import Section, markdown_table
from ..images.grid import image_grid
from ..randomness import permutation
from .names import TONES, Emoji
from .tones import read_tones

EXPLANATION = """
*Skin tone*: of emoji with one, whether the sample's pixels show that of the caption, where those of the true picture
do. *Name*: whether a noised CLIP, which has not seen these emoji either, finds the sample's caption among {candidates}
captions of held-out emoji. *Name of true pictures*: the same of the font's own. 95 % Wilson intervals.

*Distance*: the median RMS distance, in levels of 255, of a sample to the most similar training picture, and of the true
picture to it: a copy has 0. Many emoji differ from others by their skin tone or a detail only.
"""
EXAMPLES = 24  # emoji in the grid of a split


@dataclass(frozen=True)
class Share:
    """right: successes of n trials."""

    right: int
    n: int

    def __str__(self) -> str:
        low, high = wilson(self.right, self.n)
        return f"{self.right / self.n:.2f} [{low:.2f}, {high:.2f}]" if self.n else "–"

    def to_dict(self) -> dict:
        """With the share as ``score`` and its 95 % interval, where there are trials."""
        low, high = wilson(self.right, self.n)
        return {**asdict(self), **({"score": self.right / self.n, "low": low, "high": high} if self.n else {})}


@dataclass(frozen=True)
class SplitScore:
    """Of the samples of a split: see EXPLANATION."""

    tone: Share
    name: Share
    true_name: Share
    distance: float
    true_distance: float

    def to_dict(self) -> dict:
        return {**asdict(self), **{name: getattr(self, name).to_dict() for name in ("tone", "name", "true_name")}}


def most_similar(pictures: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index [N] of the most similar of the known pictures to each picture, and its RMS distance [N] in levels.

    pictures, known: uint8 [N, H, W, 3] and [M, H, W, 3].
    """
    flat, others = (each.reshape(len(each), -1).astype(np.float32) for each in (pictures, known))
    squares = (flat**2).sum(1)[:, None] - 2 * flat @ others.T + (others**2).sum(1)
    index = squares.argmin(1)
    return index, np.sqrt(((flat - others[index]) ** 2).mean(1))


def tone_share(emoji: Sequence[Emoji], samples: np.ndarray, true: np.ndarray, palette: np.ndarray) -> Share:
    """Of the emoji with one skin tone that is read right from the true picture: those whose sample shows it."""
    said = np.array([TONES.index(each.tones[0]) if len(each.tones) == 1 else -1 for each in emoji])
    judged = (said >= 0) & (read_tones(true, palette) == said)
    return Share(int((read_tones(samples, palette) == said)[judged].sum()), int(judged.sum()))


def name_share(images: np.ndarray, texts: np.ndarray, candidates: int) -> Share:
    """How many images are most similar to their own text, among it and ``candidates`` - 1 others, drawn for each.

    images, texts: [N, D] features of length 1, row i of the same emoji; N at least ``candidates``.
    """
    similarity = images @ texts.T
    right = 0
    for i, row in enumerate(similarity):
        order = permutation(i, "emoji candidates", len(texts))
        others = order[order != i][: candidates - 1]
        right += bool(row[i] > row[others].max())
    return Share(right, len(images))


def examples(emoji: Sequence[Emoji], samples: np.ndarray, true: np.ndarray, closest: np.ndarray, title: str) -> Section:
    """A grid of EXAMPLES emoji, spread evenly: true picture, sample, most similar training picture."""
    chosen = np.arange(min(EXAMPLES, len(emoji))) * len(emoji) // min(EXAMPLES, len(emoji))
    cells = np.stack([true, samples, closest], 1)[chosen].reshape(-1, *true.shape[1:])
    labels = [text for i in chosen.tolist() for text in (emoji[i].name, "sample", "nearest in training")]
    return Section(
        f"Held-out {title}",
        "True picture, sample, and the training picture that is most similar to the sample; not selected.",
        image_grid(cells, labels, 12),
        f"emoji_{title}.png",
    )


def held_out_section(scores: Mapping[str, SplitScore], candidates: int) -> Section:
    header = ["held out", "skin tone", "name", "name of true pictures", "distance", "of true pictures"]
    rows: list[list[object]] = [
        [split, each.tone, each.name, each.true_name, f"{each.distance:.1f}", f"{each.true_distance:.1f}"]
        for split, each in scores.items()
    ]
    rows.append(["chance", f"{1 / len(TONES):.2f}", f"{1 / candidates:.3f}", f"{1 / candidates:.3f}", "", ""])
    return Section("Emoji", f"{EXPLANATION.format(candidates=candidates)}\n{markdown_table(header, rows)}")
