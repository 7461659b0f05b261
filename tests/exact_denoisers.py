"""Exact denoisers: for Gaussians of equal width around a few centers, the score has a closed form."""

import numpy as np
import torch

from diff_dalle.diffusion import SAMPLERS, ModelMeanType
from diff_dalle.diffusion.parametrization import TARGETS

CENTERS = torch.tensor([[-0.8, 0.3], [0.5, 0.6], [0.1, -0.7]], dtype=torch.float64)


def posterior_mean(x, alpha_bar, scale):
    """E[x_start | x_t = x], [N, 2], at the levels ᾱ [N] or at one: the posterior means of the components, weighted by
    their probabilities."""
    alpha_bar = torch.as_tensor(alpha_bar, dtype=torch.float64).view(-1, 1)
    spread = alpha_bar * scale**2 + 1 - alpha_bar
    offset = x[:, None] - alpha_bar.sqrt()[:, None] * CENTERS
    share = (-offset.square().sum(2) / (2 * spread)).softmax(1)
    means = CENTERS + (alpha_bar.sqrt() * scale**2 / spread)[:, None] * offset
    return (share[..., None] * means).sum(1)


class ExactModel:
    """The prediction required by ``process``, for data of a mixture of Gaussians of width ``scale`` at CENTERS.

    Samples are [N, 2, 1, 1]. At width 0 the data are three points.

    alpha_bar: the model's time input t [N] → ᾱ [N] float64; by default t counts steps of ``original``, or else of
               ``process``.
    """

    def __init__(self, process, original=None, scale=0.0, alpha_bar=None):
        self.process, self.scale, self.calls = process, scale, 0
        levels = torch.tensor((original or process).alphas_cumprod) if alpha_bar is None else None
        self.alpha_bar = alpha_bar or (lambda t: levels[t])

    def __call__(self, x, t, **_):
        self.calls += 1
        alpha_bar = self.alpha_bar(t)
        x_start = posterior_mean(x.double().flatten(1), alpha_bar, self.scale)[..., None, None]
        alpha_bar = alpha_bar.view(-1, 1, 1, 1)
        eps = (x - alpha_bar.sqrt() * x_start) / (1 - alpha_bar).sqrt()
        output = {
            ModelMeanType.EPSILON: eps,
            ModelMeanType.START_X: x_start,
            ModelMeanType.VELOCITY: alpha_bar.sqrt() * eps - (1 - alpha_bar).sqrt() * x_start,
        }[self.process.model_mean_type].to(x.dtype)
        if self.process.model_var_type.is_learned:
            output = torch.cat([output, torch.full_like(output, -1.0)], dim=1)  # the smallest variance
        return output


class ExactFlow:
    """The same of a network in a ``LogSnrProcess`` whose time input is that of the noise schedule flow. It sees x_t = a
    x_start + b noise."""

    def __init__(self, process, scale=0.0):
        self.process, self.scale = process, scale

    def __call__(self, x, t, **_):
        log_snr = -2 * torch.logit(t.double() / 1000)
        a, b = self.process.scales(log_snr, x.double())
        preserved = (x / torch.hypot(a, b)).flatten(1)
        x_start = posterior_mean(preserved, torch.sigmoid(log_snr), self.scale)[..., None, None]
        target = TARGETS[self.process.config.prediction]
        return target.make(x_start, (x - a * x_start) / b, a, b).to(x.dtype)


def even_betas(steps, first=4.0, last=-4.0):
    """Betas of a process whose λ (half the log of SNR) decreases in equal steps, as in the theory of the solvers."""
    alphas_cumprod = 1 / (1 + np.exp(-2 * np.linspace(first, last, steps)))
    return 1 - alphas_cumprod / np.append(1.0, alphas_cumprod[:-1])


def solve(name, process, model, count=256, clip=False, dtype=torch.float32):
    """The result [count, 2] of a sampler, from seeded noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, 1, 1, generator=generator, dtype=dtype)
    denoise = process.denoiser(model, clip_denoised=clip)
    *_, last = SAMPLERS[name](process, denoise, x, lambda t: torch.randn(x.shape, generator=generator, dtype=dtype))
    return last.x.flatten(1)


def check_ends_at_the_data(x):
    """At width 0, nearly all samples x [N, 2] end at a center, each in its share."""
    distances = (x[:, None] - CENTERS).norm(dim=2)
    assert (distances.min(1).values < 0.05).float().mean() > 0.97  # the others end between two centers
    shares = distances.argmin(1).bincount(minlength=3) / len(x)
    assert (shares - 1 / 3).abs().max() < 0.13  # four standard errors at N = 256, and the solver's own


def check_distribution(x, scale):
    """Mean and covariance of 2 000 samples are the data's."""
    covariance = torch.cov(CENTERS.T, correction=0) + scale**2 * torch.eye(2)
    assert (x.mean(0) - CENTERS.mean(0)).abs().max() < 0.05
    assert (x.T.cov() - covariance).abs().max() < 0.05
