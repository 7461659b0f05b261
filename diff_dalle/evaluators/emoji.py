"""Scores of what the emoji world holds out: skin tones, names, and the most similar training pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from PIL import Image

from ..evaluation.intervals import wilson
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..evaluation.retrieval import CANDIDATES
from ..images.grid import image_grid
from ..randomness import permutation
from ..worlds.emoji.font import square_of
from ..worlds.emoji.names import TONES, Emoji
from ..worlds.emoji.world import SPLITS, read_emoji
from .context import Context
from .copies import most_similar

EXPLANATION = """
*Skin tone*: of emoji with one, whether the sample's pixels show that of the caption, where those of the true picture
do. *Name*: whether a noised CLIP finds the sample's caption among {candidates} captions of held-out emoji. *Name
of true pictures*: the same of the font's own, which samples can hardly exceed. 95 % Wilson intervals.

*Distance*: the median RMS distance, in levels of 255, of a sample to the most similar training picture, and of the true
picture to it: a copy has 0. Many emoji differ from others by their skin tone or a detail only.
"""
EXAMPLES = 24  # emoji in the grid of a split


def emoji_world(context: Context) -> Report:
    training, *held_out = SPLITS
    folder, size, judge = context.settings.emoji_dir, context.pipeline.image_size, context.judge
    known, pictures = read_emoji(folder, training)
    pictures = _at_size(pictures, size)
    toned = [i for i, each in enumerate(known) if len(each.tones) == 1]
    palette = skin_palette(pictures[toned], [known[i].tones[0] for i in toned])
    splits = {split: read_emoji(folder, split) for split in held_out}
    candidates = min(CANDIDATES, *(len(emoji) for emoji, _ in splits.values()))
    scores, rows, examples = dict[str, Any](), list[list[object]](), list[Section]()
    for split, (emoji, true) in splits.items():
        true, names = _at_size(true, size), [each.name for each in emoji]
        samples = context.sample(names, context.default_guidance, all_stages=True)[-1]
        texts = judge.encode_text(names).cpu().numpy()
        seen = (_at_size(each, judge.image_size) for each in (samples, true))
        found, real = (judge.encode_image(each).cpu().numpy() for each in seen)
        closest, distance = most_similar(samples, [pictures])
        shares: dict[str, Share] = {
            "tone": tone_share(emoji, samples, true, palette),
            "name": name_share(found, texts, candidates),
            "true_name": name_share(real, texts, candidates),
        }
        distances = [float(np.median(each)) for each in (distance, most_similar(true, [pictures])[1])]
        rows.append([split, *shares.values(), *(f"{each:.1f}" for each in distances)])
        scores[split] = {name: share.to_dict() for name, share in shares.items()}
        scores[split] |= dict(zip(("distance", "true_distance"), distances, strict=True))
        examples.append(_examples(emoji, samples, true, closest, split))
    rows.append(["chance", f"{1 / len(TONES):.2f}", *[f"{1 / candidates:.3f}"] * 2, "", ""])
    header = ["held out", "skin tone", "name", "name of true pictures", "distance", "of true pictures"]
    table: list[Part] = [EXPLANATION.format(candidates=candidates), Table(header, rows)]
    return Report([Section("Emoji", table), *examples], {"emoji": scores}, table)


def _examples(
    emoji: Sequence[Emoji], samples: np.ndarray, true: np.ndarray, closest: np.ndarray, title: str
) -> Section:
    """A grid of EXAMPLES emoji, spread evenly: true picture, sample, most similar training picture."""
    chosen = np.arange(min(EXAMPLES, len(emoji))) * len(emoji) // min(EXAMPLES, len(emoji))
    cells = np.stack([true, samples, closest], 1)[chosen].reshape(-1, *true.shape[1:])
    labels = [text for i in chosen.tolist() for text in (emoji[i].name, "sample", "nearest in training")]
    text = "True picture, sample, and the training picture that is most similar to the sample; not selected."
    return Section(f"Held-out {title}", [text, Figure(f"emoji_{title}.png", image_grid(cells, labels, 12))])


def _at_size(pictures: np.ndarray, size: int) -> np.ndarray:
    """uint8 [N, H, W, 3] → [N, size, size, 3]."""
    return np.stack([np.asarray(square_of(Image.fromarray(each), size)) for each in pictures])


# ------------------------------------------------------------------------------------------------------------- scores

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
