"""Divergences, likelihoods and weights against independent computations."""

import math

import numpy as np
import pytest
import torch
from network_making import seeded
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from diff_dalle.diffusion.losses import (
    discretized_gaussian_log_likelihood,
    mean_flat,
    min_snr_weights,
    normal_kl,
    p2_weights,
)


def test_normal_kl():
    """Equals torch.distributions, also with numbers in place of tensors."""
    mean1, logvar1, mean2, logvar2 = seeded(4, 5, 6)
    expected = kl_divergence(Normal(mean1, (logvar1 / 2).exp()), Normal(mean2, (logvar2 / 2).exp()))
    assert_close(normal_kl(mean1, logvar1, mean2, logvar2), expected)
    standard = kl_divergence(Normal(mean1, (logvar1 / 2).exp()), Normal(0.0, 1.0))
    assert_close(normal_kl(mean1, logvar1, 0.0, 0.0), standard)


@pytest.mark.parametrize("log_scale", [-5.0, -2.0, 0.0])
def test_discretized_likelihood(log_scale):
    """The probabilities of all 256 values sum to 1, and each is close to the exact Gaussian's."""
    x = torch.arange(256) / 127.5 - 1
    mean, scale = torch.full_like(x, 0.1), torch.full_like(x, log_scale)
    found = discretized_gaussian_log_likelihood(x, means=mean, log_scales=scale).exp()
    assert found.sum().item() == pytest.approx(1, abs=1e-4)
    exact = Normal(0.1, math.exp(log_scale))
    upper = torch.where(x > 0.999, torch.inf, x + 1 / 255)
    lower = torch.where(x < -0.999, -torch.inf, x - 1 / 255)
    assert_close(found, exact.cdf(upper) - exact.cdf(lower), atol=2e-3, rtol=0)


def test_mean_flat():
    """Averages everything but the first axis."""
    values = torch.arange(24.0).view(2, 3, 2, 2)
    assert mean_flat(values).tolist() == [5.5, 17.5]


def test_weights():
    """min-SNR is flat up to gamma and falls as 1/SNR; P2 with gamma 0 is off; SNR 0 gives finite weights."""
    snr = np.array([0.0, 0.5, 5.0, 50.0])
    assert min_snr_weights(snr, gamma=5.0) == pytest.approx([1, 1, 1, 0.1])
    assert p2_weights(snr, k=1.0, gamma=1.0) == pytest.approx([1, 1 / 1.5, 1 / 6, 1 / 51])
    assert p2_weights(snr, k=1.0, gamma=0.0) == pytest.approx([1, 1, 1, 1])
