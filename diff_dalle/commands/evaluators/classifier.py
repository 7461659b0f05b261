"""What the noised CLIP says: of samples of every guidance setting, and of real images, which are the ceiling.

In the shapes world ShapeEval scores the guidance instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from ...evaluation.guidance_report import (
    GRID_COLUMNS,
    GuidanceSetting,
    Score,
    guidance_sections,
    guidance_settings,
    scores_to_dict,
)
from ...evaluation.intervals import wilson
from ...evaluation.report import Section, markdown_table
from ...evaluation.retrieval import CANDIDATES, retrieval, same_captions
from ...images.grid import image_grid
from ...shapes.prompts import ShapePrompt
from ...shapes.shape_eval import evaluate_shapes
from .context import Context, Findings, rendered

SCALES = (1.0, 4.0, 16.0)  # classifier scales when none are given
SHAPES_TEXT = (
    "Fraction of images of single objects in which the number, shape, color, size and position are all right, judged "
    "from the pixels alone (ShapeEval's *all attributes*). A text-unconditional generator does not read the caption: "
    "only the classifier steers it."
)
SIMILARITY_TEXT = "Mean cosine similarity, from -1 to 1, of the classifier's image and text features."
RETRIEVAL_TEXT = (
    "How often the classifier matches real images and captions: recall at 1 and 5 (R@1, R@5). At the chance level, its "
    "gradient carries no information about the caption."
)


def real_images(context: Context) -> Findings:
    """Real images of data_dir and how often the classifier retrieves their captions: the ceiling for generated ones."""
    data, score = context.captioned, _recall(context, context.real_features)
    columns = min(GRID_COLUMNS, len(data.images))
    grid = image_grid(data.images[:columns], data.captions[:columns], columns)
    text = (
        f"Images of the first captions. The classifier retrieves the captions of {score.value:.3f} ({score.low:.3f} – "
        f"{score.high:.3f}) of {score.n} real images, each among {_candidates(context)}."
    )
    return Findings([Section("Real images", text, grid, "real.png")], {"real images": asdict(score)})


def _candidates(context: Context) -> int:
    return min(CANDIDATES, len(context.captioned.captions))


def _recall(context: Context, images: Tensor) -> Score:
    """Fraction of images whose caption is the first among candidates; an incomplete last block is omitted.

    images: features [N, D], image i of caption i of data_dir.
    """
    data, block = context.captioned, _candidates(context)
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


def _settings(context: Context) -> list[GuidanceSetting]:
    """The guidance settings to compare: without, classifier-free, by the noised CLIP, both, and text-unconditional."""
    scales = context.run.classifier.classifier_scale or SCALES
    return guidance_settings(context.guidance_scale, scales, context.base.tokenizer is not None)


def guidance(context: Context) -> Findings:
    """The effect of guidance on the base, scored by ShapeEval in the shapes world, by retrieval on other data."""
    if context.settings.shapes_dir:
        prompts = context.shape_prompts(("attributes",), context.settings.guidance_prompts)
        captions, text = [prompt.text for prompt in prompts], SHAPES_TEXT
        scores = {setting: _shape_score(context, prompts, setting) for setting in _settings(context)}
    else:
        captions, text = context.captioned.captions, _ceiling_text(context)
        scores = {each: _recall(context, context.features(captions, each)) for each in _settings(context)}
    images = {setting: context.sample(captions, setting)[0] for setting in scores}
    return Findings(guidance_sections(text, scores, images, captions), {"guidance": scores_to_dict(scores)})


def _shape_score(context: Context, prompts: Sequence[ShapePrompt], setting: GuidanceSetting) -> Score:
    images = context.sample([prompt.text for prompt in prompts], setting)[0]
    row = evaluate_shapes(images, prompts)["all attributes"]
    return Score(row.score, row.low, row.high, row.n)


def _ceiling_text(context: Context) -> str:
    ceiling = _recall(context, context.real_features)
    return (
        f"Fraction of images whose caption the classifier retrieves among {_candidates(context)}. Ceiling (real "
        f"images): {ceiling.value:.3f} ({ceiling.low:.3f} – {ceiling.high:.3f}). The classifier is biased toward "
        "images that it guided: compare only settings without it."
    )


def similarity(context: Context) -> Findings:
    """Noised-CLIP score of the samples of every guidance setting, and of real images."""
    data = context.captioned
    features = {setting.name: context.features(data.captions, setting) for setting in _settings(context)}
    features["real images"] = context.real_features
    text, scores = context.text_features, {}
    for name, image in features.items():
        own, other = ((image * caption).sum(1).mean().item() for caption in (text, text.roll(1, 0)))
        scores[name] = {"own caption": own, "another's caption": other}
    rows = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in scores.items()]
    table = markdown_table(["guidance", "own caption", "another's caption"], rows)
    return Findings([Section("Noised-CLIP score", f"{SIMILARITY_TEXT}\n\n{table}")], {"similarity": scores})


def by_noise_level(context: Context) -> Findings:
    """Retrieval on real images by noise level: where it is at chance, the classifier cannot guide."""
    if context.settings.shapes_dir:
        prompts = context.shape_prompts(("attributes",), 4 * CANDIDATES)
        distinct = {prompt.text: prompt for prompt in prompts}  # else two captions could be true of one image
        captions, images = list(distinct), rendered(list(distinct.values()), context.base.image_size)
    else:
        captions, images = context.captioned.captions, context.captioned.images
    table = context.classifier.retrieval(images, captions)
    text = f"{RETRIEVAL_TEXT}\n\n{table.text()}"
    section = Section("Classifier accuracy by noise level", text, table.plot(), "retrieval.png")
    return Findings([section], {"retrieval": {str(t): dict(row) for t, row in table.recall.items()}}, table.text())
