"""Distances between two sets of images, as functions of their features.

Features are [N, D] matrices of any network. Compare numbers only between runs with the same network, the same resizing
and similar N. All computations are in float64. To add a metric: a function and a line in ``METRICS``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError

_ROWS = 512  # rows of a pairwise matrix in memory at a time
_NEIGHBORS = 3  # k of Kynkäänniemi et al. 2019


def _checked(real: Tensor, fake: Tensor, minimum: int) -> tuple[Tensor, Tensor]:
    if real.ndim != 2 or fake.ndim != 2 or real.shape[1] != fake.shape[1]:
        shapes = f"{tuple(real.shape)} and {tuple(fake.shape)}"
        raise InputError(f"features of real and generated images must be [N, D] with the same D, not {shapes}")
    if min(len(real), len(fake)) < minimum:
        counts = f"{len(real)} and {len(fake)}"
        raise InputError(f"this metric needs at least {minimum} real and {minimum} generated images, not {counts}")
    return real.double(), fake.double()


def _covariance(features: Tensor) -> Tensor:
    centered = features - features.mean(0)
    return centered.T @ centered / (len(features) - 1)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric square root of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def frechet_distance(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Squared 2-Wasserstein distance between Gaussians with the features' means and covariances.

    |µ₁ − µ₂|² + tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½) (Dowson & Landau 1982; FID, Heusel et al. 2017, with Inception
    features). Its bias is positive and falls about as 1/N: compare at equal N, well above D.
    """
    real, fake = _checked(real, fake, 2)
    first, second = _covariance(real), _covariance(fake)
    root = _root(first)
    # The symmetric form has real eigenvalues, unlike Σ₁Σ₂; rounding can leave tiny negative ones.
    cross = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    distance = (real.mean(0) - fake.mean(0)).square().sum() + first.trace() + second.trace() - 2 * cross
    return {"frechet_distance": max(0.0, float(distance))}


def _kernel_sum(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([((rows @ b.T / a.shape[1] + 1) ** 3).sum() for rows in a.split(_ROWS)]).sum()


def kernel_distance(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Unbiased squared maximum mean discrepancy with the kernel (x·y / D + 1)³.

    Bińkowski et al. 2018 (KID, with Inception features), over all pairs instead of random subsets. Its expectation is 0
    for equal distributions, so estimates can be negative.
    """
    real, fake = _checked(real, fake, 2)
    distance = -2 * _kernel_sum(real, fake) / (len(real) * len(fake))
    for own in (real, fake):
        diagonal = ((own.square().sum(1) / own.shape[1] + 1) ** 3).sum()
        distance = distance + (_kernel_sum(own, own) - diagonal) / (len(own) * (len(own) - 1))
    return {"kernel_distance": float(distance)}


def _distances(rows: Tensor, features: Tensor) -> Tensor:
    """Euclidean distances [R, N]. Exact: the default of cdist, by a matrix product, returns small positive distances
    for equal rows, so that an image can fall outside the ball of radius 0 around its duplicate."""
    return torch.cdist(rows, features, compute_mode="donot_use_mm_for_euclid_dist")


def _radii(features: Tensor) -> Tensor:
    """[N] distance of each row to its k-th nearest neighbor, itself excluded."""
    nearest = [_distances(rows, features).topk(_NEIGHBORS + 1, largest=False).values for rows in features.split(_ROWS)]
    return torch.cat(nearest)[:, -1]


def _coverage(points: Tensor, centers: Tensor, radii: Tensor) -> float:
    """Fraction of points within the radius of at least one center."""
    inside = [(_distances(rows, centers) <= radii).any(1) for rows in points.split(_ROWS)]
    return float(torch.cat(inside).double().mean())


def precision_recall(real: Tensor, fake: Tensor) -> dict[str, float]:
    """Fidelity and coverage (Kynkäänniemi et al. 2019), k = 3.

    precision: fraction of generated features inside the real manifold, the union of the balls around the real features
    whose radii are the distances to the k-th nearest neighbors; recall: the same with the roles exchanged.
    """
    real, fake = _checked(real, fake, _NEIGHBORS + 1)
    return {"precision": _coverage(fake, real, _radii(real)), "recall": _coverage(real, fake, _radii(fake))}


METRICS: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "fid": frechet_distance,
    "kid": kernel_distance,
    "precision_recall": precision_recall,
}
