"""Metrics of features against closed forms and plain numpy."""

import math

import numpy as np
import pytest
import torch

from diff_dalle.errors import InputError
from diff_dalle.evaluation.intervals import Z_95, wilson
from diff_dalle.evaluation.metrics import METRICS, frechet_distance, kernel_distance, precision_recall

D = 5


def normal(seed: int, n: int, d: int = D) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_moments(seed: int, n: int, mean: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Features whose sample mean and sample covariance are exactly these."""
    white = normal(seed, n, len(mean))
    white = white - white.mean(0)
    white = white @ torch.linalg.inv(torch.linalg.cholesky(white.T @ white / (n - 1))).T
    return white @ torch.linalg.cholesky(covariance).T + mean


def covariance(seed: int) -> torch.Tensor:
    a = normal(seed, D)
    return a @ a.T + torch.eye(D)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_returns_plain_finite_numbers(name):
    """The battery over METRICS: floats by name, also from float32 features and unequal N."""
    values = METRICS[name](normal(0, 40).float(), normal(1, 30).float())
    assert values and all(isinstance(value, float) and math.isfinite(value) for value in values.values())


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_refuses_what_it_cannot_compare(name):
    """Different D, a missing axis, too few images."""
    for real, fake in ((normal(0, 9), normal(0, 9, 4)), (normal(0, 9)[0], normal(0, 9)), (normal(0, 9), normal(0, 1))):
        with pytest.raises(InputError):
            METRICS[name](real, fake)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_ignores_the_order_of_images(name):
    """Shuffling either side changes nothing beyond rounding."""
    real, fake = normal(0, 700), normal(1, 600) + 0.3
    shuffled = METRICS[name](real.flip(0), fake[torch.randperm(600)])
    assert shuffled == pytest.approx(METRICS[name](real, fake), rel=1e-9, abs=1e-12)


def test_frechet_distance_of_a_set_to_itself_is_zero():
    assert frechet_distance(normal(0, 50), normal(0, 50))["frechet_distance"] < 1e-10


def test_frechet_distance_matches_the_closed_form_for_diagonal_covariances():
    """|µ₁ − µ₂|² + Σ (√a − √b)², which needs no matrix root."""
    a, b = torch.rand(D, dtype=torch.float64) + 0.1, torch.rand(D, dtype=torch.float64) * 3
    means = normal(3, 2)
    found = frechet_distance(with_moments(1, 60, means[0], a.diag()), with_moments(2, 80, means[1], b.diag()))
    expected = (means[0] - means[1]).square().sum() + (a.sqrt() - b.sqrt()).square().sum()
    assert found["frechet_distance"] == pytest.approx(float(expected), rel=1e-9)


def test_frechet_distance_matches_the_eigenvalues_of_the_product():
    """For covariances that do not commute: tr (Σ₁Σ₂)^½ from numpy's eigenvalues of the plain product."""
    first, second = covariance(4), covariance(5)
    found = frechet_distance(
        with_moments(1, 60, torch.zeros(D).double(), first), with_moments(2, 60, torch.ones(D).double(), second)
    )
    cross = np.sqrt(np.linalg.eigvals((first @ second).numpy()).real).sum()
    expected = D + float(first.trace() + second.trace()) - 2 * cross
    assert found["frechet_distance"] == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_survives_singular_covariances():
    """Fewer images than dimensions: finite, and the shift of the mean is still in it."""
    real = normal(0, 8, 32)
    assert frechet_distance(real, real + 1)["frechet_distance"] == pytest.approx(32, rel=1e-6)


def test_kernel_distance_matches_three_plain_loops():
    """The unbiased estimate, pair by pair."""
    real, fake = normal(0, 13), normal(1, 11) * 1.5 + 0.2

    def kernel(x, y):
        return (float(x @ y) / D + 1) ** 3

    def own(z):
        return np.mean([kernel(z[i], z[j]) for i in range(len(z)) for j in range(len(z)) if i != j])

    expected = own(real) + own(fake) - 2 * np.mean([kernel(x, y) for x in real for y in fake])
    assert kernel_distance(real, fake)["kernel_distance"] == pytest.approx(expected, rel=1e-9)


def test_kernel_distance_of_one_distribution_is_zero_on_average():
    """Over 60 pairs of sets the mean is within four standard errors of 0; a shifted set is far from it."""
    values = np.array([kernel_distance(normal(2 * k, 80), normal(2 * k + 1, 80))["kernel_distance"] for k in range(60)])
    assert abs(values.mean()) < 4 * values.std(ddof=1) / math.sqrt(60)
    assert (values < 0).any()
    assert kernel_distance(normal(0, 80), normal(1, 80) + 1)["kernel_distance"] > 5 * values.std()


def test_precision_and_recall_at_their_extremes():
    """One set: both 1. Far apart: both 0. A generator stuck in one of two modes: precision 1, recall about half."""
    real = torch.cat([normal(0, 100), normal(1, 100) + 50])
    assert precision_recall(real, real) == {"precision": 1.0, "recall": 1.0}
    assert precision_recall(real, real + 1000) == {"precision": 0.0, "recall": 0.0}
    stuck = precision_recall(real, real[:100])
    assert stuck["precision"] == 1.0 and 0.5 <= stuck["recall"] < 0.55


def test_repeated_images_lie_inside_their_own_manifold():
    """Four equal images have balls of radius 0, which must contain them: distances of equal rows are exactly 0."""
    features = normal(0, 120)
    features[60:] = features[torch.arange(60) % 15]
    assert precision_recall(features, features) == {"precision": 1.0, "recall": 1.0}
    assert precision_recall(features, features[60:64].repeat(5, 1)) == {"precision": 1.0, "recall": 4 * 5 / 120}


def test_precision_and_recall_match_plain_numpy():
    """Radii and membership from a full distance matrix, third neighbors excluding oneself."""
    real, fake = normal(0, 60), normal(1, 50) * 1.3

    def covered(points, centers):
        own = np.sort(np.linalg.norm(centers[:, None] - centers[None], axis=-1), axis=1)[:, 3]
        return (np.linalg.norm(points[:, None] - centers[None], axis=-1) <= own).any(1).mean()

    expected = {"precision": covered(fake.numpy(), real.numpy()), "recall": covered(real.numpy(), fake.numpy())}
    assert precision_recall(real, fake) == pytest.approx(expected)


@pytest.mark.parametrize("right, n", [(0, 10), (3, 10), (10, 10), (970, 1000)])
def test_wilson_interval_solves_its_equation(right, n):
    """Its ends are the proportions p at which the score lies exactly z standard deviations away."""
    for p in wilson(right, n):
        assert (right / n - p) ** 2 == pytest.approx(Z_95**2 * p * (1 - p) / n, abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)
