"""Scores of what the emoji world holds out: skin tones, names, and the most similar training pictures."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ...emoji.font import square_of
from ...emoji.report import SplitScore, examples, held_out_section, most_similar, name_share, tone_share
from ...emoji.shards import read_emoji
from ...emoji.tones import skin_palette
from ...emoji.world import SPLITS
from ...evaluation.report import Section
from ...evaluation.retrieval import CANDIDATES
from .context import Context, Findings


def emoji_world(context: Context) -> Findings:
    training, *held_out = SPLITS
    folder, size = context.settings.emoji_dir, context.base.image_size
    known, pictures = read_emoji(folder, training)
    pictures = _at_size(pictures, size)
    toned = [i for i, each in enumerate(known) if len(each.tones) == 1]
    palette = skin_palette(pictures[toned], [known[i].tones[0] for i in toned])
    scores, sections = {}, list[Section]()
    splits = {split: read_emoji(folder, split) for split in held_out}
    candidates = min(CANDIDATES, *(len(emoji) for emoji, _ in splits.values()))
    for split, (emoji, true) in splits.items():
        true, names = _at_size(true, size), [each.name for each in emoji]
        samples = context.sample(names, context.default_guidance)[0]
        texts = context.classifier.encode_text(names).cpu().numpy()
        found, real = (context.classifier.encode_image(each).cpu().numpy() for each in (samples, true))
        closest, distance = most_similar(samples, pictures)
        scores[split] = SplitScore(
            tone_share(emoji, samples, true, palette),
            name_share(found, texts, candidates),
            name_share(real, texts, candidates),
            float(np.median(distance)),
            float(np.median(most_similar(true, pictures)[1])),
        )
        sections.append(examples(emoji, samples, true, pictures[closest], split))
    table = held_out_section(scores, candidates)
    return Findings([table, *sections], {"emoji": {name: each.to_dict() for name, each in scores.items()}}, table.text)


def _at_size(pictures: np.ndarray, size: int) -> np.ndarray:
    """uint8 [N, H, W, 3] → [N, size, size, 3]."""
    return np.stack([np.asarray(square_of(Image.fromarray(each), size)) for each in pictures])
