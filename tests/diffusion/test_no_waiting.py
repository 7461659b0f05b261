"""Nothing in a training or sampling step waits for the device.

Tensors on the "meta" device have no values, so reading one raises; where there is a GPU, CUDA itself raises when the
host waits for it.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import (
    SAMPLERS,
    DiffusionConfig,
    GuidanceConfig,
    LossSecondMomentResampler,
    create_gaussian_diffusion,
    guided_denoiser,
)
from diff_dalle.diffusion.parametrisation import LOSSES


class CountTransfers(TorchDispatchMode):
    """Counts the operations that take something from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in (*args, out) if isinstance(value, torch.Tensor)}
        self.count += "cpu" in devices and len(devices) > 1
        return out


def train(process, sampler, x_start, u):
    """A step's losses, with timesteps from a resampler that learns from them."""
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
        diffusion_steps=40, noise_schedule="cosine", prediction="v", variance="learned_range", loss_type=loss,
        loss_weighting="none" if "kl" in loss else "min_snr", rescale_timesteps=True,
    )  # fmt: skip
    full, short = create_gaussian_diffusion(config), create_gaussian_diffusion(config, "8")
    x, labels = torch.zeros(4, 3, 4, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    u, resampler = torch.zeros(4, dtype=torch.float64, device=device), LossSecondMomentResampler(full)
    return lambda: (train(full, resampler, x, u), sample(short, x, labels))


@pytest.mark.parametrize("loss", LOSSES)
def test_without_values(loss):
    """A step can be computed without any value being known, and from the second on no table is copied."""
    step, counts = exercise(loss, "meta"), []
    for _ in range(2):
        with CountTransfers() as transfers:
            step()
        counts.append(transfers.count)
    assert counts[0] > 0 and counts[1] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loss", LOSSES)
def test_cuda_is_never_waited_for(loss):
    """Once its tables are on the GPU, a step makes no synchronising call."""
    step = exercise(loss, "cuda")
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
