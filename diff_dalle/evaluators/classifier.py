"""What the noised CLIP reads of real images, which is the ceiling for generated ones."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from ..evaluation.intervals import Fraction, wilson
from ..evaluation.report import Figure, Part, Report, Section
from ..evaluation.retrieval import CANDIDATES, retrieval, same_captions
from ..images.grid import image_grid
from .context import Context, renders_of

GRID_COLUMNS = 8  # real images that are shown
RETRIEVAL_TEXT = (
    "How often the classifier matches real images and captions: recall at 1 and 5 (R@1, R@5). At the chance level, its "
    "gradient carries no information about the caption."
)


def real_images(context: Context) -> Report:
    """Real images of data_dir and how often the classifier retrieves their captions: the ceiling for generated ones."""
    data, score = context.captioned, recall(context, context.real_features)
    columns = min(GRID_COLUMNS, len(data.images))
    grid = image_grid(data.images[:columns], data.captions[:columns], columns)
    text = (
        f"Images of the first captions. The classifier retrieves the captions of {score.value:.3f} "
        f"({score.interval(3)}) of {score.n} real images, each among {candidates(context)}."
    )
    return Report([Section("Real images", [text, Figure("real.png", grid)])], {"real images": asdict(score)})


def candidates(context: Context) -> int:
    """Captions among which an image finds its own."""
    return min(CANDIDATES, len(context.captioned.captions))


def recall(context: Context, images: Tensor) -> Fraction:
    """Fraction of images whose caption is the first among candidates; an incomplete last block is omitted.

    images: features [N, D], image i of caption i of data_dir.
    """
    data, block = context.captioned, candidates(context)
    text = context.text_features
    tokens, mask = data.cond.tokens, data.cond.mask
    assert tokens is not None and mask is not None  # the classifier has a tokenizer
    hits = []
    for start in range(0, len(text) - block + 1, block):
        part = slice(start, start + block)
        same = same_captions(tokens[part], mask[part]).to(text.device)
        hits.append(retrieval(images[part], text[part], same)["image_to_text_at_1"])
    found = torch.cat(hits)
    return Fraction(float(found.mean()), *wilson(float(found.sum()), len(found)), len(found))


def by_noise_level(context: Context) -> Report:
    """Retrieval on real images by noise level: where it is at chance, the classifier cannot guide."""
    if context.settings.shapes_dir:
        prompts = context.shape_prompts(("attributes",), 4 * CANDIDATES)
        distinct = {prompt.text: prompt for prompt in prompts}  # else two captions could be true of one image
        captions, images = list(distinct), renders_of(list(distinct.values()), context.base.image_size)
    else:
        captions, images = context.captioned.captions, context.captioned.images
    table = context.classifier.retrieval(images, captions)
    parts: list[Part] = [RETRIEVAL_TEXT, table.text(), Figure("retrieval.png", table.plot())]
    scores = {"retrieval": {str(t): dict(row) for t, row in table.recall.items()}}
    return Report([Section("Classifier accuracy by noise level", parts)], scores, [table.text()])
