"""Latents of mean 0 and standard deviation 1: what an autoencoder's task measures after every step, and follows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..training.task import Task

LEAST_RATE = 0.01  # of a step, after the first ones, which count evenly


def sample_moments(latents: Tensor) -> Tensor:
    """Mean and mean square of each sample: [N, …] → [N, 2] float32, without gradient."""
    latents = latents.detach().float().flatten(1)
    return torch.stack([latents.mean(1), latents.square().mean(1)], 1)


def usable(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Both, with 0 and 1 where one of them is not finite, or there is no deviation."""
    good = mean.isfinite() & std.isfinite() & (std > 0)
    return torch.where(good, mean, 0.0), torch.where(good, std, 1.0)


def calibration_rate(updates: int) -> float:
    """How far the ``updates``-th step moves what is calibrated; the first one all the way."""
    return max(1 / updates, LEAST_RATE)


class Calibrating(Task):
    """A task that counts its updates."""

    updates = 0

    def extra_state(self) -> dict[str, Tensor]:
        return {**super().extra_state(), "updates": torch.tensor(self.updates)}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        rest = dict(state)
        self.updates = int(rest.pop("updates"))
        super().load_extra_state(rest)


def moments_text(values: Mapping[str, float]) -> str:
    """The latents' mean and standard deviation, of the means of ``sample_moments``."""
    mean, square = values["latent_mean"], values["latent_square"]
    return f"latents: mean {mean:.3f}, standard deviation {max(0.0, square - mean**2) ** 0.5:.3f}"
