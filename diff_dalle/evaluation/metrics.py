"""Distances between two sets of pictures, as pure functions of their features.

Features are [N, D] matrices from any network; the numbers compare only between runs that used the same network, the
same resizing and about the same N. Everything is computed in float64. To add a metric: a function and a line in
``METRICS``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError

_ROWS = 512  # rows of a pairwise matrix held at once
_NEIGHBOURS = 3  # k of Kynkäänniemi et al. 2019


def _checked(real: Tensor, fake: Tensor, least: int) -> tuple[Tensor, Tensor]:
    if real.ndim != 2 or fake.ndim != 2 or real.shape[1] != fake.shape[1]:
        shapes = f"{tuple(real.shape)} and {tuple(fake.shape)}"
        raise InputError(f"features of real and generated pictures must be [N, D] with one D, not {shapes}")
    if min(len(real), len(fake)) < least:
        raise InputError(f"this metric needs at least {least} pictures on each side, not {len(real)} and {len(fake)}")
    return real.double(), fake.double()


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    return centred.T @ centred / (len(features) - 1)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def frechet_distance(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Squared 2-Wasserstein distance of the Gaussians with the features' means and covariances.

    |µ₁ − µ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½) (Dowson & Landau 1982; FID, Heusel et al. 2017, with Inception
    features). Biased upwards, about as 1/N: compare at equal N, and keep N well above D.
    """
    real, fake = _checked(real, fake, 2)
    first, second = _covariance(real), _covariance(fake)
    root = _root(first)
    # Of a symmetric form, unlike of Σ₁Σ₂, the eigenvalues are real; rounding can leave tiny negative ones.
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    distance = (real.mean(0) - fake.mean(0)).square().sum() + first.trace() + second.trace() - 2 * cross
    return {"frechet_distance": max(0.0, float(distance))}


def _kernel_sum(a: Tensor, b: Tensor) -> Tensor:
    return sum(((rows @ b.T / a.shape[1] + 1) ** 3).sum() for rows in a.split(_ROWS))


def kernel_distance(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Unbiased squared maximum mean discrepancy with the kernel (x·y / D + 1)³.

    Bińkowski et al. 2018 (KID, with Inception features), over all pairs instead of random subsets. Its expectation
    is 0 for equal distributions, so single values can be negative.
    """
    real, fake = _checked(real, fake, 2)
    distance = -2 * _kernel_sum(real, fake) / (len(real) * len(fake))
    for own in (real, fake):
        diagonal = ((own.square().sum(1) / own.shape[1] + 1) ** 3).sum()
        distance = distance + (_kernel_sum(own, own) - diagonal) / (len(own) * (len(own) - 1))
    return {"kernel_distance": float(distance)}


def _radii(features: Tensor) -> Tensor:
    """[N] distance of each row to its k-th nearest neighbour, itself not counted."""
    nearest = [
        torch.cdist(rows, features).topk(_NEIGHBOURS + 1, largest=False).values for rows in features.split(_ROWS)
    ]
    return torch.cat(nearest)[:, -1]


def _covered(points: Tensor, centres: Tensor, radii: Tensor) -> float:
    """Fraction of points within the radius of at least one centre."""
    inside = [(torch.cdist(rows, centres) <= radii).any(1) for rows in points.split(_ROWS)]
    return float(torch.cat(inside).double().mean())


def precision_recall(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Fidelity and coverage (Kynkäänniemi et al. 2019), k = 3.

    precision: fraction of generated features within the real manifold, the union of balls around the real features
    that reach to their k-th neighbours; recall: the same with the roles exchanged.
    """
    real, fake = _checked(real, fake, _NEIGHBOURS + 1)
    return {"precision": _covered(fake, real, _radii(real)), "recall": _covered(real, fake, _radii(fake))}


METRICS: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "frechet_distance": frechet_distance,
    "kernel_distance": kernel_distance,
    "precision_recall": precision_recall,
}
