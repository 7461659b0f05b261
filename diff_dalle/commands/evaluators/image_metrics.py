"""Metrics of ``evaluate.py`` that have networks of their own, instead of one whose features are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...evaluation.feature_networks import extract_features, load_feature_network
from ...evaluation.metrics import inception_score
from ...evaluation.perceptual import Lpips
from ...images.pixels import from_uint8

BATCH_SIZE = 64  # pairs of images that go through a network at once
Measure = Callable[[np.ndarray, np.ndarray], dict[str, float]]  # of real and generated images, uint8 [N, H, W, 3]


def inception_scores(feature_network: str, device: torch.device) -> Measure:
    """The Inception score of the second set, of the network's logits."""
    network = load_feature_network(feature_network, device, logits=True)

    def measure(real: np.ndarray, generated: np.ndarray) -> dict[str, float]:
        return {"inception_score": inception_score(extract_features(network, generated, device), splits=1)[0]}

    return measure


def perceptual_distances(weights: str, device: torch.device) -> Measure:
    """LPIPS of image i of one set and image i of the other, as far as both have one."""
    network = Lpips("alex", weights, device, "--lpips_weights")

    def measure(real: np.ndarray, generated: np.ndarray) -> dict[str, float]:
        count = min(len(real), len(generated))
        parts = [
            [from_uint8(each[start : min(start + BATCH_SIZE, count)]).to(device) for each in (real, generated)]
            for start in range(0, count, BATCH_SIZE)
        ]
        return {"lpips": float(torch.cat([network(*pair).cpu() for pair in parts]).double().mean())}

    return measure


# By name: a function of whose network it is.
IMAGE_METRICS: dict[str, Callable[[str, torch.device], Measure]] = {
    "is": inception_scores,
    "lpips": perceptual_distances,
}
