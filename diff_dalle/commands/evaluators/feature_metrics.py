"""Distances between generated and real images in feature space, of ``evaluation.metrics.METRICS``.

The features are those of ``feature_network`` or, without one, of the given classifier on clean images, a stand-in for
an Inception network: compare numbers between runs with the same network only.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...errors import InputError
from ...evaluation.feature_networks import extract_features, load_feature_network
from ...evaluation.metrics import METRICS
from ...evaluation.report import Section, markdown_table
from .context import Context, rendered
from .contract import BASE, FEATURES, Evaluator, Findings

MIN_IMAGES = 8  # each half of the real images must have 4, for precision and recall


def run(context: Context) -> Findings:
    real, generated, extractor = _features(context)
    names = context.settings.metrics or tuple(METRICS)
    # Alternate images, because prompts are ordered by task.
    rows = {"generated": _metrics(names, real, generated), "real halves": _metrics(names, real[::2], real[1::2])}
    n, dimensions = real.shape
    table = markdown_table(["images", *rows["generated"]], [[name, *row.values()] for name, row in rows.items()])
    text = (
        f"Generated images compared with real images of the same captions. Features: {extractor}, {dimensions} "
        f"dimensions; n = {n} images on each side. Reference: one half of the real images compared with the other. The "
        "Fréchet distance has a positive bias that falls with n. Compare only numbers with the same features and n."
    )
    scores = {"features": extractor, "dimensions": dimensions, "n": n, **rows}
    return Findings([Section("Distances in feature space", f"{text}\n\n{table}")], {"feature_metrics": scores}, table)


def _features(context: Context) -> tuple[Tensor, Tensor, str]:
    """[N, D] of real and of generated images, of the same captions, at the base's resolution; whose features."""
    settings, device = context.settings, context.world.device
    if settings.shapes_dir:
        prompts = context.shape_prompts()
        captions, images = [prompt.text for prompt in prompts], rendered(prompts, context.base.image_size)
    else:
        captions, images = context.captioned.captions, context.captioned.images
        if len(images) < MIN_IMAGES:
            raise InputError(f"--data_dir has {len(images)} images, but feature_metrics needs at least {MIN_IMAGES}")
    if settings.feature_network:
        network = load_feature_network(settings.feature_network, device)
        generated = context.sample(captions, context.default_guidance)[0]
        real, fake = (extract_features(network, each, device) for each in (images, generated))
        return real, fake, settings.feature_network
    real = context.classifier.encode_image(images) if settings.shapes_dir else context.real_features
    extractor = f"image tower of {context.run.classifier.classifier_path} at t = 0"
    return real, context.features(captions, context.default_guidance), extractor


def _metrics(names: Sequence[str], real: Tensor, fake: Tensor) -> dict[str, float]:
    return {key: value for name in names for key, value in METRICS[name](real, fake).items()}


FEATURE_METRICS = Evaluator("feature_metrics", (BASE, FEATURES), run, asked_by="metrics", least=MIN_IMAGES)
