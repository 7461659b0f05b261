"""Nothing in a training or sampling step waits for the device.

Tensors on the "meta" device have no values, so reading one raises an error; on a GPU, CUDA raises an error when the
host synchronizes with it.
"""

import pytest
import torch
from waiting import needs_cuda, run_without_waiting, transfers

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import (
    SAMPLERS,
    DiffusionConfig,
    GuidanceConfig,
    LossSecondMomentResampler,
    create_gaussian_diffusion,
    guided_denoiser,
)
from diff_dalle.diffusion.parametrization import LOSSES


def train(process, sampler, x_start, u):
    """A step's losses, with timesteps from a loss-aware resampler."""
    t, weights = sampler.sample_at(u)
    losses = process.training_losses(lambda x, t: torch.cat([x, x], dim=1), x_start, t)["loss"] * weights
    sampler.update(t, losses)


def sample(process, x, labels):
    """All samplers, with guidance in an interval and dynamic thresholding."""
    config = GuidanceConfig(guidance_scale=3.0, guidance_interval=(0.2, 0.8), thresholding="dynamic")
    cond, null = Conditioning(labels=labels), Conditioning(labels=labels)
    denoise = guided_denoiser(process, lambda x, t, cond: torch.cat([x, x], dim=1), cond, null, config)
    for sampler in SAMPLERS.values():
        *_, _ = sampler(process, denoise, x, lambda t: x)


def exercise(loss, device):
    config = DiffusionConfig(
        diffusion_steps=40,
        noise_schedule="cosine",
        prediction="v",
        variance="learned_range",
        loss_type=loss,
        loss_weighting="none" if "kl" in loss else "min_snr",
        rescale_timesteps=True,
    )
    full, short = create_gaussian_diffusion(config), create_gaussian_diffusion(config, "8")
    x, labels = torch.zeros(4, 3, 4, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    u, resampler = torch.zeros(4, dtype=torch.float64, device=device), LossSecondMomentResampler(full)
    return lambda: (train(full, resampler, x, u), sample(short, x, labels))


@pytest.mark.parametrize("loss", LOSSES)
def test_without_values(loss):
    """A step can be computed without any value, and from the second on no table is copied."""
    first, second = transfers(exercise(loss, "meta"))
    assert first > 0 and second == 0


@needs_cuda
@pytest.mark.parametrize("loss", LOSSES)
def test_cuda_is_never_waited_for(loss):
    """Once its tables are on the GPU, a step makes no synchronizing call."""
    run_without_waiting(exercise(loss, "cuda"))
