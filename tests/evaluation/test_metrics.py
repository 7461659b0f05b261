"""Metrics of features against closed forms and plain numpy."""

import math

import numpy as np
import pytest
import torch

from diff_dalle.config import InputError
from diff_dalle.evaluation.intervals import Z_95, wilson
from diff_dalle.evaluation.metrics import (
    METRICS,
    density_coverage,
    frechet_distance,
    inception_score,
    kernel_distance,
    kernel_distance_of_subsets,
    precision_recall,
)

D = 5


def normal(seed: int, n: int, d: int = D) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


# ------------------------------------------------------------------------------------------------- density and coverage


@pytest.mark.parametrize("k", [1, 5])
def test_density_and_coverage_match_plain_numpy(k):
    """Ball by ball, also where rows come in several blocks."""
    real, fake = normal(0, 60), normal(1, 600).abs() * 1.5
    distance = np.linalg.norm(real[:, None] - fake[None], axis=-1)
    radii = np.sort(np.linalg.norm(real[:, None] - real[None], axis=-1), axis=1)[:, k]
    inside = distance <= radii[:, None]
    expected = {"density": inside.sum() / (k * 600), "coverage": inside.any(1).mean()}
    assert density_coverage(real, fake, k) == pytest.approx(expected)
    assert 0 < expected["coverage"] < 1


# -------------------------------------------------------------------------------------------------- subsets and classes


def test_a_kernel_distance_of_subsets_is_that_of_all_on_average():
    """Unbiased: over many subsets the mean is within four standard errors of the distance over all pairs."""
    real, fake = normal(0, 60), normal(1, 50) * 1.3
    mean, deviation = kernel_distance_of_subsets(real, fake, 400, 12)
    assert abs(mean - kernel_distance(real, fake)["kernel_distance"]) < 4 * deviation / math.sqrt(400)
    assert deviation > 0 and kernel_distance_of_subsets(real, fake, 400, 12) == (mean, deviation)
    whole = kernel_distance_of_subsets(real[:50], fake, 100, 50)
    assert whole == (pytest.approx(kernel_distance(real[:50], fake)["kernel_distance"], rel=1e-9), 0.0)
    assert kernel_distance_of_subsets(real[:50], torch.cat([fake, fake]), 100, 50)[1] > 0
    with pytest.raises(InputError, match="at least 51 real and 51 generated images, not 60 and 50"):
        kernel_distance_of_subsets(real, fake, 1, 51)


def test_inception_score_of_few_images():
    """Of fewer than splits, each image is a part, of score 1, as in torchmetrics."""
    assert inception_score(torch.eye(4) * 1000, 1) == (pytest.approx(4), 0.0)  # the number of classes
    assert inception_score(normal(0, 2), 10) == (pytest.approx(1), pytest.approx(0))
    with pytest.raises(InputError, match=r"not \[1, 4\]"):
        inception_score(torch.ones(1, 4))


# -------------------------------------------------------------------------------------------------------- torchmetrics


class Features(torch.nn.Module):
    """Images are features."""

    num_features = 6

    def forward(self, images):
        return images


@pytest.fixture()
def sides():
    return normal(0, 300, 6), normal(1, 200, 6) * 1.4 + 0.2


@pytest.mark.filterwarnings("ignore:Metric `")
def test_values_are_torchmetrics(sides):
    """Of the same features, and the same random subsets and splits."""
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.image.kid import KernelInceptionDistance

    real, fake = sides
    fid = FrechetInceptionDistance(Features())
    kernel = {"degree": 2, "gamma": 0.3, "coef": 1.5}
    kids = KernelInceptionDistance(Features(), 7, 50), KernelInceptionDistance(Features(), 7, 50, **kernel)
    score = InceptionScore(Features(), 4)
    for metric in (fid, *kids):
        metric.update(real, real=True)
        metric.update(fake, real=False)
    score.update(fake)
    assert frechet_distance(real, fake)["frechet_distance"] == pytest.approx(float(fid.compute()), rel=1e-6)
    for metric, options in zip(kids, ({}, kernel), strict=True):
        torch.manual_seed(5)
        expected = [float(value) for value in metric.compute()]
        assert kernel_distance_of_subsets(real, fake, 7, 50, seed=5, **options) == pytest.approx(expected, rel=1e-9)
    torch.manual_seed(6)
    assert inception_score(fake, 4, seed=6) == pytest.approx([float(value) for value in score.compute()], rel=1e-9)


@pytest.mark.parametrize("right, n", [(0, 10), (3, 10), (10, 10), (970, 1000)])
def test_wilson_interval_solves_its_equation(right, n):
    """Its ends are the proportions p at which the score lies exactly z standard deviations away."""
    for p in wilson(right, n):
        assert (right / n - p) ** 2 == pytest.approx(Z_95**2 * p * (1 - p) / n, abs=1e-12)
    assert wilson(0, 0) == (0.0, 1.0)
