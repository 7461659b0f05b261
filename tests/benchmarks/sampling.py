"""Sampling as ``sample.py`` does it, relative to a bare loop over the same network; and what a step takes beside the
network, relative to the network.

The bare loop has its noise drawn and its steps chosen in advance, encodes the text once, evaluates both halves of
guidance as one batch, and has DPM-Solver++(2M) written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from checkpoint_making import save_model
from torch import Tensor, nn

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion.diffusion_config import DiffusionConfig
from diff_dalle.diffusion.gaussian_diffusion import SpacedDiffusion
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.diffusion.process import Process
from diff_dalle.diffusion.sampling import PreviewConfig, SampleBatch, SamplerConfig, sample_batch, seeds_draw
from diff_dalle.images.signal import PixelSignal
from diff_dalle.models.generator import GeneratorConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.sampling.pipeline import Pipeline, load
from diff_dalle.sampling.stage import Stage
from diff_dalle.text.tokenizer import Tokenizer

from .timing import temporary_folder

PROMPTS = ["a red circle", "a small blue square", "two green crosses", "a star above a ring"]
UNET = DenoiserConfig(image_size=64, num_channels=64, num_res_blocks=2, attention_resolutions=(16, 8))
TEXT = TextEncoderConfig(enc_attn_dim=128, enc_depth=2, enc_heads=4)
DIFFUSION = DiffusionConfig(noise_schedule="cosine")
SAMPLER = SamplerConfig("dpm++2m", 5)
SCALE = 3.0
SPREAD = 0.02  # of the random numbers added to the initial weights, with which the network would predict 0
STEPS = 100  # timed without the network
STEPS_APART = SamplerConfig("dpm++2m", STEPS, spacing="even")


def write_generator(path: str) -> None:
    """A checkpoint of a generator with random weights."""
    run = GeneratorRun(model=GeneratorConfig(UNET, TEXT), diffusion=DIFFUSION, preview=PreviewConfig(sample_interval=0))
    save_model(run, path, fresh=1.0, spread=SPREAD)


def _pipeline() -> Pipeline:
    path = str(temporary_folder() / "ema.pt")
    write_generator(path)
    return load(path, "cpu", "fp32")


def _text(stage: Stage, prompts: list[str]) -> Conditioning:
    tokens, mask = cast("Tokenizer", stage.tokenizer)(prompts, TEXT.text_length)
    return Conditioning(tokens=tokens, mask=mask)


@torch.no_grad()
def _encoded(network: nn.Module, text: Conditioning) -> Conditioning:
    return cast("Callable[[Conditioning], Conditioning]", network.encode_text)(text)


def _noise(count: int) -> Tensor:
    shape = (PixelSignal().channels, UNET.image_size, UNET.image_size)
    return seeds_draw(range(count), 0, torch.device("cpu")).normal("sampling start", shape)


@torch.no_grad()
def bare_loop(network: nn.Module, x: Tensor, cond: Conditioning, scale: float, process: Process) -> Tensor:
    """``network`` over the steps of ``process``, from the noise x [N, C, H, W] to the samples.

    cond: encoded conditions of N images; or, at a ``scale`` other than 1, of 2N, of which the second half is negative.
    """
    before, h_before, halves = None, 0.0, 1 if scale == 1 else 2
    steps, levels = cast("SpacedDiffusion", process).timestep_map, process.alphas_cumprod.tolist()
    alpha, sigma = ([math.sqrt(f(level)) for level in levels] for f in (lambda a: a, lambda a: 1 - a))
    for i in reversed(range(len(steps))):
        t = torch.full((halves * len(x),), steps[i])
        eps = network(torch.cat([x] * halves), t, cond=cond)
        if halves == 2:
            given, null = eps.chunk(2)
            eps = null + scale * (given - null)
        x_start = ((x - sigma[i] * eps) / alpha[i]).clamp(-1, 1)
        if i == 0:
            return x_start
        h = math.log(alpha[i - 1] / sigma[i - 1] * sigma[i] / alpha[i])
        target = x_start
        if before is not None:
            target = x_start + 0.5 * min(h / h_before, 1.0) * (x_start - before)
        x = sigma[i - 1] / sigma[i] * x + alpha[i - 1] * -math.expm1(-h) * target
        before, h_before = x_start, h
    raise AssertionError("a process has steps")


def bare(guided: bool = False) -> Callable[[], np.ndarray]:
    pipeline = _pipeline()
    stage = pipeline.stages[0]
    network, x, process = stage.network(), _noise(len(PROMPTS)), SAMPLER.process(DIFFUSION)
    text = _text(stage, PROMPTS + [""] * len(PROMPTS) if guided else PROMPTS)
    scale = SCALE if guided else 1.0

    def work() -> np.ndarray:
        return PixelSignal().to_pixels(bare_loop(network, x, _encoded(network, text), scale, process))

    return work


def sampled(guided: bool = False) -> Callable[[], np.ndarray]:
    pipeline, guidance = _pipeline(), GuidanceConfig(guidance_scale=SCALE if guided else 1.0)
    return lambda: pipeline.sample(PROMPTS, sampler=SAMPLER, guidance=guidance, progress=False)


def gate(guided: bool = False) -> dict[str, tuple[float, float]]:
    """Maximum difference in levels: rounding to one of 256 levels can turn either way."""
    found, expected = sampled(guided)().astype(int), bare(guided)().astype(int)
    return {"images": (float(abs(found - expected).max()), 1.0), "uniform images": (float(found.std() < 1), 0.0)}


# ------------------------------------------------------------------------------------------------- steps and network


class NoNetwork(nn.Module):
    """Weights its input, whatever it is asked. What remains of a step is bookkeeping.

    weights: [2N, C, H, W] from ½ to 1, others for the negative half: the samples depend on each step, and on guidance.
    """

    def __init__(self):
        super().__init__()
        x = _noise(2 * len(PROMPTS))
        self.weights = nn.Parameter(0.75 + 0.25 * x.sin(), requires_grad=False)

    def encode_text(self, cond: Conditioning) -> Conditioning:
        return cond

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        return x * self.weights


def _conditions(count: int) -> Conditioning:
    return Conditioning(tokens=torch.ones(count, 4, dtype=torch.long), mask=torch.ones(count, 4, dtype=torch.bool))


def network_alone() -> Callable[[], Tensor]:
    """One guided evaluation."""
    stage = _pipeline().stages[0]
    network, x, t = stage.network(), torch.cat([_noise(len(PROMPTS))] * 2), torch.full((2 * len(PROMPTS),), 500)
    cond = _encoded(network, _text(stage, PROMPTS * 2))

    def work() -> Tensor:
        with torch.no_grad():
            return network(x, t, cond=cond)

    return work


def steps_alone() -> Callable[[], Tensor]:
    """STEPS_APART with guidance, without a network."""
    network, process, count = NoNetwork(), STEPS_APART.process(DIFFUSION), len(PROMPTS)
    cond = _conditions(count)
    batch = SampleBatch(PixelSignal(), (UNET.image_size, UNET.image_size), range(count), cond, cond)
    return lambda: sample_batch(network, process, batch, STEPS_APART, GuidanceConfig(SCALE))


def gate_steps() -> dict[str, tuple[float, float]]:
    """Maximum difference from the bare loop."""
    count, process = len(PROMPTS), STEPS_APART.process(DIFFUSION)
    expected = bare_loop(NoNetwork(), _noise(count), _conditions(2 * count), SCALE, process)
    return {"samples": (float((steps_alone()() - expected).abs().max()), 1e-4)}
