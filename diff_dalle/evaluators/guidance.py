"""What a noised CLIP reads of real images, the ceiling for generated ones, and the effect of guidance.

The same captions are sampled without guidance, with classifier-free guidance, guided by the noised CLIP, and with both.
ShapeEval scores the samples in the shapes world; elsewhere the noised CLIP does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

from ..evaluation.intervals import Fraction, wilson
from ..evaluation.plots import line_plot
from ..evaluation.report import Figure, Part, Report, Section, Table
from ..evaluation.retrieval import CANDIDATES, retrieval, same_captions
from ..images.grid import image_grid
from ..worlds.shapes.prompts import ShapePrompt
from ..worlds.shapes.shape_eval import evaluate_shapes
from .context import Context, GuidanceSetting, renders_of

GRID_COLUMNS = 8  # real images, and samples of each guidance setting, that are shown
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


def guidance_settings(context: Context) -> list[GuidanceSetting]:
    """All combinations of the classifier scales and 0 with: no classifier-free guidance, classifier-free guidance, and
    (if the generator reads text) a text-unconditional generator."""
    scales = sorted({0.0, *(context.run.classifier.classifier_scale or SCALES)})
    bases = [(free, True) for free in dict.fromkeys((1.0, context.guidance_scale))]
    bases += [(1.0, False)] * (context.base.tokenizer is not None)
    return [GuidanceSetting(free, scale, conditional) for free, conditional in bases for scale in scales]


def guidance(context: Context) -> Report:
    """The effect of guidance on the base, scored by ShapeEval in the shapes world, by retrieval on other data."""
    settings = guidance_settings(context)
    if context.settings.shapes_dir:
        prompts = context.shape_prompts(("attributes",), context.settings.guidance_prompts)
        captions, text = [prompt.text for prompt in prompts], SHAPES_TEXT
        scores = {setting: _shape_score(context, prompts, setting) for setting in settings}
    else:
        captions, text = context.captioned.captions, _ceiling_text(context)
        scores = {setting: recall(context, context.features(captions, setting)) for setting in settings}
    images = {setting: context.sample(captions, setting)[0] for setting in scores}
    listed = [{**asdict(setting), **asdict(score)} for setting, score in scores.items()]
    return Report(guidance_sections(text, scores, images, captions), {"guidance": listed})


def _shape_score(context: Context, prompts: Sequence[ShapePrompt], setting: GuidanceSetting) -> Fraction:
    images = context.sample([prompt.text for prompt in prompts], setting)[0]
    row = evaluate_shapes(images, prompts)["all attributes"]
    return Fraction(row.score, row.low, row.high, row.n)


def _ceiling_text(context: Context) -> str:
    ceiling = recall(context, context.real_features)
    return (
        f"Fraction of images whose caption the classifier retrieves among {candidates(context)}. Ceiling (real "
        f"images): {ceiling.value:.3f} ({ceiling.interval(3)}). The classifier is biased toward "
        "images that it guided: compare only settings without it."
    )


def guidance_sections(
    text: str,
    scores: Mapping[GuidanceSetting, Fraction],
    images: Mapping[GuidanceSetting, np.ndarray],
    captions: Sequence[str],
) -> list[Section]:
    """A table, a plot of the score over the classifier scale, and a grid of the first images of every setting.

    text: what the score is; images: uint8 [N, H, W, 3] by setting, image i sampled for captions[i].
    """
    title = "Effect of guidance"
    rows = [[setting.name, f"{score.value:.3f}", score.interval(3), score.n] for setting, score in scores.items()]
    curves: dict[str, list[tuple[float, ...]]] = {}
    for setting, score in scores.items():
        name = replace(setting, classifier_scale=0.0).name
        curves.setdefault(name, []).append((setting.classifier_scale, score.value, score.low, score.high))
    plot = line_plot(curves, "noised-CLIP guidance scale (0 = off)", "score")
    columns = min(GRID_COLUMNS, len(captions))
    cells = np.concatenate([sampled[:columns] for sampled in images.values()])
    grid = image_grid(cells, _labels(list(images), captions[:columns]), columns)
    table = Table(["guidance", "score", "95 % interval", "n"], rows)
    rows_text = "One row per setting, with the same captions and noise."
    return [
        Section(title, [text, table, Figure("guidance.png", plot)]),
        Section(f"{title}: samples", [rows_text, Figure("guidance_grid.png", grid)]),
    ]


def _labels(settings: Sequence[GuidanceSetting], captions: Sequence[str]) -> list[str]:
    """Setting names in the first column, captions in the first row."""
    labels = []
    for row, setting in enumerate(settings):
        for column, caption in enumerate(captions):
            parts = [f"[{setting.name}]"] if column == 0 else []
            labels.append(" ".join([*parts, caption] if row == 0 else parts))
    return labels


def similarity(context: Context) -> Report:
    """Noised-CLIP score of the samples of every guidance setting, and of real images."""
    captions = context.captioned.captions
    features = {setting.name: context.features(captions, setting) for setting in guidance_settings(context)}
    features["real images"] = context.real_features
    text, scores = context.text_features, {}
    for name, image in features.items():
        own, other = ((image * caption).sum(1).mean().item() for caption in (text, text.roll(1, 0)))
        scores[name] = {"own caption": own, "another's caption": other}
    rows = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in scores.items()]
    table = Table(["guidance", "own caption", "another's caption"], rows)
    return Report([Section("Noised-CLIP score", [SIMILARITY_TEXT, table])], {"similarity": scores})


# ------------------------------------------------------------------------------------------- the noised CLIP itself


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
