"""Networks that are exactly right: for equal Gaussians around a few centres, the score is a formula."""

import numpy as np
import torch

from diff_dalle.diffusion import ModelMeanType

CENTRES = torch.tensor([[-0.8, 0.3], [0.5, 0.6], [0.1, -0.7]], dtype=torch.float64)


class ExactModel:
    """Predicts what ``process`` asks of a network, for data of a mixture of Gaussians of width ``scale`` at CENTRES.

    Samples are [N, 2, 1, 1]. A width of 0 makes the data three points. t counts steps of ``original``.
    """

    def __init__(self, process, original=None, scale=0.0):
        self.process, self.scale, self.calls = process, scale, 0
        self.alphas_cumprod = torch.tensor((original or process).alphas_cumprod)

    def x_start(self, x, alpha_bar):
        """E[x_start | x_t]: the centres' answers weighted by their probabilities."""
        x, alpha_bar = x.double().flatten(1), alpha_bar.view(-1, 1)
        spread = alpha_bar * self.scale**2 + 1 - alpha_bar
        away = x[:, None] - alpha_bar.sqrt()[:, None] * CENTRES
        share = (-away.square().sum(2) / (2 * spread)).softmax(1)
        answers = CENTRES + (alpha_bar.sqrt() * self.scale**2 / spread)[:, None] * away
        return (share[..., None] * answers).sum(1)[..., None, None]

    def __call__(self, x, t, **_):
        self.calls += 1
        alpha_bar = self.alphas_cumprod[t]
        x_start, alpha_bar = self.x_start(x, alpha_bar), alpha_bar.view(-1, 1, 1, 1)
        eps = (x - alpha_bar.sqrt() * x_start) / (1 - alpha_bar).sqrt()
        output = {
            ModelMeanType.EPSILON: eps,
            ModelMeanType.START_X: x_start,
            ModelMeanType.VELOCITY: alpha_bar.sqrt() * eps - (1 - alpha_bar).sqrt() * x_start,
        }[self.process.model_mean_type].to(x.dtype)
        if self.process.model_var_type.is_learned:
            output = torch.cat([output, torch.full_like(output, -1.0)], dim=1)  # the smallest variance
        return output


def even_betas(steps, first=4.0, last=-4.0):
    """Betas of a process whose λ (half the log of SNR) falls in equal steps, as the solvers' theory has it."""
    alphas_cumprod = 1 / (1 + np.exp(-2 * np.linspace(first, last, steps)))
    return 1 - alphas_cumprod / np.append(1.0, alphas_cumprod[:-1])
