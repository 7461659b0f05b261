"""Distances between generated and real images in feature space: all of ``evaluation.metrics.METRICS``.

The features are those of the given classifier on clean images, a stand-in for an Inception network: compare numbers
between runs with the same classifier only.
"""

from __future__ import annotations

from torch import Tensor

from ...errors import InputError
from ...evaluation.metrics import METRICS
from ...evaluation.report import Section, markdown_table
from .context import Context, rendered
from .contract import BASE, CLASSIFIER, Evaluator, Findings

MIN_IMAGES = 8  # each half of the real images must have 4, for precision and recall


def run(context: Context) -> Findings:
    real, generated = _features(context)
    extractor = f"image tower of {context.run.classifier.classifier_path} at t = 0"
    # Alternate images, because prompts are ordered by task.
    rows = {"generated": _metrics(real, generated), "real halves": _metrics(real[::2], real[1::2])}
    n, dimensions = real.shape
    table = markdown_table(["images", *rows["generated"]], [[name, *row.values()] for name, row in rows.items()])
    text = (
        f"Generated images compared with real images of the same captions. Features: {extractor}, {dimensions} "
        f"dimensions; n = {n} images on each side. Reference: one half of the real images compared with the other. The "
        "Fréchet distance has a positive bias that falls with n. Compare only numbers with the same features and n."
    )
    scores = {"features": extractor, "dimensions": dimensions, "n": n, **rows}
    return Findings([Section("Distances in feature space", f"{text}\n\n{table}")], {"feature_metrics": scores}, table)


def _features(context: Context) -> tuple[Tensor, Tensor]:
    """[N, D] of real and of generated images, of the same captions, at the base's resolution."""
    if context.settings.shapes_dir:
        prompts = context.shape_prompts()
        captions = [prompt.text for prompt in prompts]
        real = context.classifier.encode_image(rendered(prompts, context.base.image_size))
    else:
        captions, real = context.captioned.captions, context.real_features
        if len(real) < MIN_IMAGES:
            raise InputError(f"--data_dir has {len(real)} images, but feature_metrics needs at least {MIN_IMAGES}")
    return real, context.features(captions, context.default_guidance)


def _metrics(real: Tensor, fake: Tensor) -> dict[str, float]:
    return {name: value for metric in METRICS.values() for name, value in metric(real, fake).items()}


FEATURE_METRICS = Evaluator("feature_metrics", (BASE, CLASSIFIER), run, default=False, least=MIN_IMAGES)
