"""Scores of samples of emoji: skin tone and name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ...evaluation.intervals import wilson
from ...randomness import permutation
from .names import TONES, Emoji

_BIN = 8  # levels of 255 that count as one color when the palette is found
_RADIUS = 20.0  # the distance from a color of the palette up to which a pixel is skin, in levels of 255


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


def skin_palette(pictures: np.ndarray, tones: Sequence[str]) -> np.ndarray:
    """The color [5, 3] of each of TONES: the one that its pictures have more of than those of other tones.

    pictures: uint8 [N, H, W, 3], each of one skin tone; tones: N of TONES, all five of them.
    """
    bins = (pictures.astype(np.int64) // _BIN).reshape(len(pictures), -1, 3)
    codes = (bins * (1, 32, 1024)).sum(2)
    of_tone = np.array([TONES.index(tone) for tone in tones])
    counts = np.stack([np.bincount(codes[of_tone == i].ravel(), minlength=32**3) for i in range(len(TONES))])
    shares = counts / counts.sum(1, keepdims=True)
    palette = []
    for i in range(len(TONES)):
        others = np.delete(shares, i, axis=0).mean(0)
        chosen = codes[of_tone == i] == (shares[i] - others).argmax()
        palette.append(pictures[of_tone == i].reshape(*chosen.shape, 3)[chosen].mean(0))
    return np.stack(palette)


def read_tones(pictures: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """The skin tone of each picture, uint8 [N, H, W, 3]: the index in TONES, int64 [N], of the color of the palette
    [5, 3] that most of its pixels are near; -1 where no pixel is near any."""
    distance = np.linalg.norm(pictures[..., None, :].astype(np.float32) - palette.astype(np.float32), axis=-1)
    near = distance.argmin(-1)[..., None] == np.arange(len(palette))
    votes = (near & (distance.min(-1, keepdims=True) < _RADIUS)).sum((1, 2))
    return np.where(votes.any(1), votes.argmax(1), -1)
