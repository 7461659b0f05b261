"""Generated images compared with real ones: in feature space by ``evaluation.metrics.METRICS``, by networks of their
own, and upsampled ones by their pixels.

The features are those of ``feature_network`` or, without one, of the given classifier on clean images, a stand-in for
an Inception network: compare numbers between runs with the same network only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import InputError
from ..evaluation.features import feature_network
from ..evaluation.fidelity import average_pool_uint8, evaluate_upsampling, upsampling_sections
from ..evaluation.metrics import METRICS, inception_score
from ..evaluation.pretrained import Lpips
from ..evaluation.report import Report, Section, Table
from ..images.signal import from_uint8
from .context import Context, renders_of

BATCH_SIZE = 64  # pairs of images that go through a network at once
MIN_IMAGES = 12  # each half of the real images must have 6, for density and coverage

Measure = Callable[[np.ndarray, np.ndarray], dict[str, float]]  # of real and generated images, uint8 [N, H, W, 3]


@dataclass(frozen=True)
class Side:
    """One of two sets. images: uint8 [N, H, W, 3]; features: [N, D]."""

    images: np.ndarray
    features: Tensor

    def every_second(self, start: int) -> Side:
        return Side(self.images[start::2], self.features[start::2])


def feature_metrics(context: Context) -> Report:
    settings = context.settings
    names = settings.metrics or tuple(METRICS)
    makers = {"is": _inception_scores, "lpips": _perceptual_distances}
    own = {name: make(context) for name, make in makers.items() if name in names}

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
    shared = "embeddings" if settings.decoder_path else "captions"
    table = Table(["images", *rows["generated"]], [[name, *row.values()] for name, row in rows.items()])
    text = (
        f"Generated images compared with real images of the same {shared}. Features: {extractor}, {dimensions} "
        f"dimensions; n = {n} images on each side. Reference: one half of the real images compared with the other. The "
        "Fréchet distance has a positive bias that falls with n. Compare only numbers with the same features and n."
    )
    scores = {"features": extractor, "dimensions": dimensions, "n": n, **rows}
    return Report([Section("Distances in feature space", [text, table])], {"feature_metrics": scores}, [table])


def _sides(context: Context) -> tuple[Side, Side, str]:
    """Real and generated images of the same captions, at the base's resolution, or of the same embeddings, at that of a
    decoder; whose features they have."""
    settings = context.settings
    if settings.decoder_path:
        images = context.real_images()[0]
        _check_count(images)
        features = feature_network(settings.feature_network, context.world.device)
        generated = context.vary(context.embed(images))[-1]
        return Side(images, features(images)), Side(generated, features(generated)), settings.feature_network
    if settings.shapes_dir:
        prompts = context.shape_prompts()
        captions, images = [prompt.text for prompt in prompts], renders_of(prompts, context.base.image_size)
    else:
        captions, images = context.captioned.captions, context.captioned.images
        _check_count(images)
    if settings.feature_network:
        features = feature_network(settings.feature_network, context.world.device)
        generated = context.sample(captions, context.default_guidance)[0]
        real, fake = (Side(each, features(each)) for each in (images, generated))
        return real, fake, settings.feature_network
    real = Side(images, context.classifier.encode_image(images) if settings.shapes_dir else context.real_features)
    sampled = context.sample(captions, context.default_guidance)[0]
    extractor = f"image tower of {context.run.classifier.classifier_path} at t = 0"
    return real, Side(sampled, context.features(captions, context.default_guidance)), extractor


def _check_count(images: np.ndarray) -> None:
    if len(images) < MIN_IMAGES:
        raise InputError(f"--data_dir has {len(images)} images, but feature_metrics needs at least {MIN_IMAGES}")


def _inception_scores(context: Context) -> Measure:
    """The Inception score of the second set, of the network's logits."""
    logits = feature_network(context.settings.feature_network, context.world.device, logits=True)

    def measure(real: np.ndarray, generated: np.ndarray) -> dict[str, float]:
        return {"inception_score": inception_score(logits(generated), splits=1)[0]}

    return measure


def _perceptual_distances(context: Context) -> Measure:
    """LPIPS of image i of one set and image i of the other, as far as both have one."""
    device = context.world.device
    network = Lpips("alex", context.settings.lpips_weights, device, "--lpips_weights")

    def measure(real: np.ndarray, generated: np.ndarray) -> dict[str, float]:
        count = min(len(real), len(generated))
        parts = [
            [from_uint8(each[start : min(start + BATCH_SIZE, count)]).to(device) for each in (real, generated)]
            for start in range(0, count, BATCH_SIZE)
        ]
        return {"lpips": float(torch.cat([network(*pair).cpu() for pair in parts]).double().mean())}

    return measure


def upsampling(context: Context) -> Report:
    """The upsamplers alone, on real images downsampled by the area filter."""
    real, captions = context.real_images()
    low_res = average_pool_uint8(real, context.upsamplers.factor)
    ours = context.upsample(captions, low_res)
    report = evaluate_upsampling(low_res, ours, real)
    sections = upsampling_sections(report, low_res, ours, real, captions)
    return Report(sections, {"upsampling": report.to_dict()}, [report.table()])
