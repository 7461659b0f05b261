"""Nothing in a training or sampling step waits for the device.

Tensors on the "meta" device have no values, so reading one raises an error; on a GPU, CUDA raises an error when the
host synchronizes with it.
"""

import functools

import pytest
import torch
from network_making import captions, make_generator
from waiting import CountNumbers, CountTransfers, needs_cuda, reads, run_without_waiting, transfers

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion import (
    SAMPLERS,
    DiffusionConfig,
    GuidanceConfig,
    LogSnrConfig,
    LogSnrProcess,
    LossSecondMomentResampler,
    create_gaussian_diffusion,
    guided_denoiser,
)
from diff_dalle.diffusion.editing import Edit, EditConfig, edited_steps
from diff_dalle.diffusion.losses import LOSSES
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_steps
from diff_dalle.diffusion.tiling import Tiled
from diff_dalle.images.signal import PixelSignal


def train(process, sampler, x_start, u):
    """A step's losses, with timesteps from a loss-aware resampler."""
    t, weights = sampler.sample_at(u)
    losses = process.training_losses(lambda x, t: torch.cat([x, x], dim=1), x_start, t)["loss"] * weights
    sampler.update(t, losses)


def sample(process, x, labels):
    """All samplers, with guidance in an interval and dynamic thresholding."""
    intervals = {"guidance_interval": (0.2, 0.8), "perturbed_attention_interval": (0.4, 1.0)}
    config = GuidanceConfig(guidance_scale=3.0, perturbed_attention_scale=2.0, thresholding="dynamic", **intervals)
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
    full, short = create_gaussian_diffusion(config), create_gaussian_diffusion(config, "4")
    x, labels = torch.zeros(4, 3, 4, 4, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    u, resampler = torch.zeros(4, dtype=torch.float64, device=device), LossSecondMomentResampler(full)
    return lambda: (train(full, resampler, x, u), loss == "mse" and sample(short, x, labels))


def exercise_log_snr(device, **settings):
    """A training step in log-SNR, and sampling with every sampler."""
    process = LogSnrProcess(LogSnrConfig(scaler="lerp", **settings))
    short, x = process.steps(5, shift=2.0), torch.zeros(4, 3, 8, 4, device=device)
    u, labels = torch.zeros(4, dtype=torch.float64, device=device), torch.zeros(4, dtype=torch.int64, device=device)

    def step():
        t = process.training_times(u)
        losses = process.training_losses(lambda x, t: torch.tanh(x), x, t)
        process.observe(process.log_snr(t), losses["mse"])
        config = GuidanceConfig(3.0, guidance_scale_end=2.0, guidance_rescale=0.7, thresholding="none")
        cond = Conditioning(labels=labels)
        denoise = guided_denoiser(short, lambda x, t, cond: torch.tanh(x), cond, cond, config)
        for sampler in SAMPLERS.values():
            *_, _ = sampler(short, denoise, x, lambda t: x)

    return step


LOG_SNR = [
    {"log_snr_schedule": "adaptive", "loss_weighting": ("adaptive", "p2"), "noise_condition": "edm"},
    {"log_snr_schedule": "stable_diffusion", "noise_condition": "stable_diffusion", "noise_condition_steps": 9},
    {"log_snr_schedule": "edm_train", "offset_noise": 0.1, "pyramid_noise": 0.75, "prediction": "flow"},
    {"log_snr_schedule": "flow", "noise_condition": "flow_steps", "loss_space": "flow"},
]


def exercise_edits(device):
    """Every kind of edit, and inpainting with every sampler."""
    config = DiffusionConfig(variance="learned_range", prediction="v")
    process = create_gaussian_diffusion(config, "3")
    x, unknown = torch.zeros(3, 3, 4, 6, device=device), torch.ones(3, 1, 4, 6, dtype=torch.bool, device=device)
    denoise = process.denoiser(lambda x, t: torch.cat([x, x], 1))
    inpainting = Edit(x, unknown, EditConfig(inpaint_resamples=2, inpaint_jump=2))
    edits = [(inpainting, name) for name in SAMPLERS]
    edits += [(Edit(x, None, EditConfig(0.5, variation)), "ddim") for variation in (None, 0.5)]

    def step():
        for edit, name in edits:
            list(edited_steps(process, SAMPLERS[name], denoise, denoise, edit, lambda name: x))

    return step


def exercise_tiles(device):
    x, t = torch.zeros(2, 3, 32, 20, device=device), torch.zeros(2, device=device)
    cond = Conditioning(low_res=torch.zeros(2, 3, 8, 5, device=device))
    network = Tiled(lambda x, t, cond: x + cond.low_res, 16, 8, 4)
    return lambda: network(x, t, cond=cond)


EXERCISES = {
    **{loss: functools.partial(exercise, loss) for loss in LOSSES},
    **{f"log_snr {i}": functools.partial(exercise_log_snr, **settings) for i, settings in enumerate(LOG_SNR)},
    "edits": exercise_edits,
    "tiles": exercise_tiles,
}


@pytest.mark.parametrize("name", EXERCISES)
def test_without_values(name):
    """A step can be computed without any value, and from the second on no table is copied."""
    first, second = transfers(EXERCISES[name]("meta"))
    assert first > 0 and second == 0


@needs_cuda
@pytest.mark.parametrize("name", EXERCISES)
def test_cuda_is_never_waited_for(name):
    """Once its tables are on the GPU, a step makes no synchronizing call."""
    run_without_waiting(EXERCISES[name]("cuda"))


@pytest.mark.parametrize("sampler", ["dpm++2m", "unipc", "ancestral"])
def test_sampling_copies_conditions_and_tables_at_its_start_and_then_nothing(sampler):
    """With text, guidance and the network itself."""
    network = make_generator().eval().requires_grad_(False).to("meta")
    process = create_gaussian_diffusion(DiffusionConfig(diffusion_steps=40), "5")
    cond = captions((3, 7))
    batch = SampleBatch(PixelSignal(3), (16, 16), [5, 6], cond, cond.drop(torch.ones(2, dtype=torch.bool)))
    counts = []
    with CountTransfers() as counting:
        for _ in sample_steps(network, process, batch, SamplerConfig(sampler, 5), GuidanceConfig(2.0)):
            counts.append(counting.count)
    assert counts == [2] * 5 and not counting.waiting


def test_what_would_wait_is_counted():
    values, there = torch.zeros(2), torch.empty(2, device="meta")
    with CountTransfers() as copies, CountNumbers() as made:
        values.to("meta")
        values.to("meta", non_blocking=True)
        there.copy_(values, non_blocking=True)
        torch.tensor([1.0])
        torch.tensor([1.0], device="meta")
    assert (copies.count, copies.waiting, made.count) == (3, 1, 1)


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy", "__bool__", "__float__", "nonzero"])
def test_the_watch_over_reads_sees_each_of_them(read):
    values, index = torch.ones(3), torch.arange(3)
    with reads([index]) as found:
        index[1:].tolist(), index.numpy()
        assert not found
        tensor = values[0] if read in ("item", "__bool__", "__float__") else values
        getattr(tensor, read)()
        assert len(found) == 1
