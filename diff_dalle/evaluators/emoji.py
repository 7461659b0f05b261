"""Scores of what the emoji world holds out: skin tones, names, and the most similar training pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from ..evaluation.nearest import most_similar
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..evaluation.retrieval import CANDIDATES
from ..images.grid import image_grid
from ..worlds.emoji.font import square_of
from ..worlds.emoji.names import TONES, Emoji
from ..worlds.emoji.scores import Share, name_share, skin_palette, tone_share
from ..worlds.emoji.world import SPLITS, read_emoji
from .context import Context

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
