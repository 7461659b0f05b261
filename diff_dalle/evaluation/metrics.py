"""Distances between two sets of images, as functions of their features.

Features are [N, D] matrices of any network. Compare numbers only between runs with the same network, the same resizing
and similar N. All computations are in float64. To add a metric: a function and a line in ``METRICS``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import InputError

_ROWS = 512  # rows of a pairwise matrix in memory at a time


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


def kernel_distance(
    real: Tensor, fake: Tensor, degree: int = 3, gamma: float | None = None, coef: float = 1.0
) -> dict[str, float]:
    """Unbiased squared maximum mean discrepancy with the kernel (γ x·y + coef)^degree; γ None = 1 / D.

    Bińkowski et al. 2018 (KID, with Inception features), over all pairs instead of random subsets. Its expectation is 0
    for equal distributions, so estimates can be negative.
    """
    real, fake = _checked(real, fake, 2)
    scale = 1 / real.shape[1] if gamma is None else gamma

    def kernel_sum(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([((scale * rows @ b.T + coef) ** degree).sum() for rows in a.split(_ROWS)]).sum()

    distance = -2 * kernel_sum(real, fake) / (len(real) * len(fake))
    for own in (real, fake):
        diagonal = ((scale * own.square().sum(1) + coef) ** degree).sum()
        distance = distance + (kernel_sum(own, own) - diagonal) / (len(own) * (len(own) - 1))
    return {"kernel_distance": float(distance)}


def kernel_distance_of_subsets(
    real: Tensor,
    fake: Tensor,
    subsets: int,
    subset_size: int,
    degree: int = 3,
    gamma: float | None = None,
    coef: float = 1.0,
    seed: int = 0,
) -> tuple[float, float]:
    """Mean and standard deviation of ``kernel_distance`` over random subsets of ``subset_size`` of each, as KID is
    usually given. InputError for fewer images than that."""
    real, fake = _checked(real, fake, max(2, subset_size))
    if len(real) == len(fake) == subset_size:
        subsets = 1  # all are the whole
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        drawn = [own[torch.randperm(len(own), generator=generator)[:subset_size]] for own in (real, fake)]
        values.append(kernel_distance(drawn[0], drawn[1], degree, gamma, coef)["kernel_distance"])
    return statistics.fmean(values), statistics.pstdev(values)


def inception_score(logits: Tensor, splits: int = 10, seed: int = 0) -> tuple[float, float]:
    """Mean and sample standard deviation over ``splits`` random parts of exp E KL(p(class | image) ‖ p(class)), from 1
    to the number of classes (Salimans et al. 2016). The deviation of one part is 0.

    logits: [N, classes] of a classifier of images, for generated images. Of fewer images than splits, each is a part.
    InputError for fewer than 2 images.
    """
    if logits.ndim != 2 or len(logits) < 2:
        raise InputError(f"the Inception score needs logits [N, classes] of 2 or more images, not {list(logits.shape)}")
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    values = []
    for part in logits.double()[order].log_softmax(1).chunk(splits):
        marginal = part.logsumexp(0) - math.log(len(part))
        values.append(math.exp((part.exp() * (part - marginal)).sum(1).mean()))
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _distances(rows: Tensor, features: Tensor) -> Tensor:
    """Euclidean distances [R, N]. Exact: the default of cdist, by a matrix product, returns small positive distances
    for equal rows, so that an image can fall outside the ball of radius 0 around its duplicate."""
    return torch.cdist(rows, features, compute_mode="donot_use_mm_for_euclid_dist")


def _radii(features: Tensor, k: int) -> Tensor:
    """[N] distance of each row to its k-th nearest neighbor, itself excluded."""
    nearest = [_distances(rows, features).topk(k + 1, largest=False).values for rows in features.split(_ROWS)]
    return torch.cat(nearest)[:, -1]


def _membership(points: Tensor, centers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of the balls around [N] centers to their k-th nearest neighbors: how many contain each of [M] points, [M], and
    which contain any, [N] bool."""
    radii = _radii(centers, k)
    counts, hit = [], torch.zeros_like(radii, dtype=torch.bool)
    for rows in points.split(_ROWS):
        inside = _distances(rows, centers) <= radii
        counts.append(inside.sum(1))
        hit |= inside.any(0)
    return torch.cat(counts), hit


def precision_recall(real: Tensor, fake: Tensor, k: int = 3) -> dict[str, float]:
    """Fidelity and coverage (Kynkäänniemi et al. 2019).

    precision: fraction of generated features inside the real manifold, the union of the balls around the real features
    whose radii are the distances to the k-th nearest neighbors; recall: the same with the roles exchanged.
    """
    real, fake = _checked(real, fake, k + 1)
    precision, recall = (_membership(*pair, k)[0] > 0 for pair in ((fake, real), (real, fake)))
    return {"precision": float(precision.double().mean()), "recall": float(recall.double().mean())}


def density_coverage(real: Tensor, fake: Tensor, k: int = 5) -> dict[str, float]:
    """Fidelity and diversity that outliers do not dominate (Naeem et al. 2020). Only real features have balls.

    density: how many real balls contain a generated feature, in units of k, on average: about 1 for equal
    distributions, and more where generated images crowd where real ones are dense; coverage: fraction of real balls
    that contain a generated feature, about 1 - 2^-k for equal distributions and N.
    """
    real, fake = _checked(real, fake, k + 1)
    counts, hit = _membership(fake, real, k)
    return {"density": float(counts.double().mean() / k), "coverage": float(hit.double().mean())}


METRICS: dict[str, Callable[[Tensor, Tensor], dict[str, float]]] = {
    "fid": frechet_distance,
    "kid": kernel_distance,
    "precision_recall": precision_recall,
    "density_coverage": density_coverage,
}
