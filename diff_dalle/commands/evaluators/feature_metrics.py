"""Generated images compared with real ones: in feature space by ``evaluation.metrics.METRICS``, by networks of their
own, and upsampled ones by their pixels.

The features are those of ``feature_network`` or, without one, of the given classifier on clean images, a stand-in for
an Inception network: compare numbers between runs with the same network only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...errors import InputError
from ...evaluation.feature_networks import extract_features, load_feature_network
from ...evaluation.fidelity import average_pool_uint8
from ...evaluation.metrics import METRICS
from ...evaluation.report import Section, markdown_table
from ...evaluation.upsampling_report import evaluate_upsampling, upsampling_sections
from .context import Context, Findings, rendered
from .image_metrics import IMAGE_METRICS

MIN_IMAGES = 12  # each half of the real images must have 6, for density and coverage


@dataclass(frozen=True)
class Side:
    """One of two sets. images: uint8 [N, H, W, 3]; features: [N, D]."""

    images: np.ndarray
    features: Tensor

    def every_second(self, start: int) -> Side:
        return Side(self.images[start::2], self.features[start::2])


def feature_metrics(context: Context) -> Findings:
    settings = context.settings
    names = settings.metrics or tuple(METRICS)
    networks = {"is": settings.feature_network, "lpips": settings.lpips_weights}
    own = {name: IMAGE_METRICS[name](networks[name], context.world.device) for name in names if name in IMAGE_METRICS}

    def values(real: Side, fake: Side) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in names:
            if name in METRICS:
                found |= METRICS[name](real.features, fake.features)
            else:
                found |= own[name](real.images, fake.images)
        return found

    real, generated, extractor = _sides(context)
    # Alternate images, because prompts are ordered by task.
    halves = real.every_second(0), real.every_second(1)
    rows = {"generated": values(real, generated), "real halves": values(*halves)}
    n, dimensions = real.features.shape
    table = markdown_table(["images", *rows["generated"]], [[name, *row.values()] for name, row in rows.items()])
    text = (
        f"Generated images compared with real images of the same captions. Features: {extractor}, {dimensions} "
        f"dimensions; n = {n} images on each side. Reference: one half of the real images compared with the other. The "
        "Fréchet distance has a positive bias that falls with n. Compare only numbers with the same features and n."
    )
    scores = {"features": extractor, "dimensions": dimensions, "n": n, **rows}
    return Findings([Section("Distances in feature space", f"{text}\n\n{table}")], {"feature_metrics": scores}, table)


def _sides(context: Context) -> tuple[Side, Side, str]:
    """Real and generated images of the same captions, at the base's resolution; whose features they have."""
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
        real, fake = (Side(each, extract_features(network, each, device)) for each in (images, generated))
        return real, fake, settings.feature_network
    real = Side(images, context.classifier.encode_image(images) if settings.shapes_dir else context.real_features)
    sampled = context.sample(captions, context.default_guidance)[0]
    extractor = f"image tower of {context.run.classifier.classifier_path} at t = 0"
    return real, Side(sampled, context.features(captions, context.default_guidance)), extractor


def upsampling(context: Context) -> Findings:
    """The upsamplers alone, on real images downsampled by the area filter."""
    real, captions = context.real_images()
    low_res = average_pool_uint8(real, context.upsamplers.factor)
    ours = context.upsample(captions, low_res)
    report = evaluate_upsampling(low_res, ours, real)
    sections = upsampling_sections(report, low_res, ours, real, captions)
    return Findings(sections, {"upsampling": report.to_dict()}, report.table())
