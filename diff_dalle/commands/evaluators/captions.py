"""Real images of data_dir and how often the classifier retrieves their captions: the ceiling for generated images."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from ...evaluation.guidance_report import GRID_COLUMNS, Score
from ...evaluation.intervals import wilson
from ...evaluation.report import Section
from ...evaluation.retrieval import CANDIDATES, retrieval, same_captions
from ...images.grid import image_grid
from .context import Context
from .contract import BASE, CAPTIONED_DATA, CLASSIFIER, Evaluator, Findings


def run(context: Context) -> Findings:
    data, score = context.captioned, real_recall(context)
    columns = min(GRID_COLUMNS, len(data.images))
    grid = image_grid(data.images[:columns], data.captions[:columns], columns)
    text = (
        f"Images of the first captions. The classifier retrieves the captions of {score.value:.3f} ({score.low:.3f} – "
        f"{score.high:.3f}) of {score.n} real images, each among {candidates(context)}."
    )
    return Findings([Section("Real images", text, grid, "real.png")], {"real images": asdict(score)})


def candidates(context: Context) -> int:
    return min(CANDIDATES, len(context.captioned.captions))


def real_recall(context: Context) -> Score:
    """The recall for real images: the ceiling for generated ones."""
    return caption_recall(context, context.real_features)


def caption_recall(context: Context, images: Tensor) -> Score:
    """Fraction of images whose caption is the first among ``candidates``; an incomplete last block is omitted.

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
    return Score(float(found.mean()), *wilson(float(found.sum()), len(found)), len(found))


CAPTIONS = Evaluator("captions", (BASE, CLASSIFIER, CAPTIONED_DATA), run)
