"""What the table for GPUs times: training steps of ours, of published forms and of other libraries; sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diff_dalle.batch import Conditioning
from diff_dalle.diffusion.diffusion_config import DiffusionConfig
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.images.signal import PixelSignal
from diff_dalle.models import kernels
from diff_dalle.models.precision import autocast, for_inference
from diff_dalle.models.units import compile_training
from diff_dalle.randomness import Draw
from diff_dalle.training.settings import OptimConfig, TrainingConfig
from diff_dalle.training.trainee import Trainee

from .gpu_subjects import Latents, Pixels, Subject, flops_per_image
from .regression import loop_of
from .train_step import EMA_RATE, LR, published_step

PRECISION = "bf16"
TOKENS, WIDTH, HEAD = 256, 1024, 64  # of the transformer, and the channels of its heads

Step = Callable[[], object]
Build = Callable[[torch.device, int], Step]  # on a device, with a batch size


# ------------------------------------------------------------------------------------------------------ training steps


def ours(
    subject: Subject,
    device: torch.device,
    batch_size: int,
    precision: str = PRECISION,
    optimizer: str = "adamw",
    backend: str = "",
    **changed: Any,
) -> Step:
    """The loop's own update. backend: torch.compile's; empty = eager. changed: settings of the network."""
    subject = subject.with_config(**changed)
    with device:
        network, batch = subject.network(), subject.batch(batch_size)
    world, config = World(SINGLE, device), OptimConfig(optimizer, lr=LR, ema_rate=(EMA_RATE,))
    trainee = Trainee(subject.task(network), config, precision, world)
    if backend:
        compile_training(trainee.task, backend)
    loop = loop_of(trainee, TrainingConfig(batch_size=batch_size), world)
    return lambda: loop.update(batch)


def with_plain_norms(build: Build) -> Build:
    """The same with torch's own operations in place of Triton's kernels."""

    def built(device: torch.device, batch_size: int) -> Step:
        def step() -> None:
            with _no_kernels():
                plain()

        with _no_kernels():
            plain = build(device, batch_size)
        return step

    return built


def _no_kernels() -> contextlib.AbstractContextManager:
    return mock.patch.object(kernels, "run_on", lambda device: False)


def published(subject: Pixels | Latents, device: torch.device, batch_size: int) -> Step:
    """The published network; with Guided-Diffusion's, its step."""
    step = published_step if isinstance(subject, Pixels) else plain_step
    return _theirs(subject, subject.published, step, device, batch_size)


def diffusers_unet(subject: Pixels, device: torch.device, batch_size: int) -> Step:
    """diffusers' U-Net with the same widths, blocks and attention, which need as many FLOPs."""
    return _theirs(subject, lambda: DiffusersUNet(subject), plain_step, device, batch_size)


def transformer(
    subject: Pixels, device: torch.device, batch_size: int, width: int = 0, precision: str = PRECISION
) -> Step:
    """torch's own transformer with as many layers as need the same FLOPs. width: 0 = ``WIDTH``."""
    return _theirs(subject, lambda: Transformer(subject, width), plain_step, device, batch_size, precision)


def _theirs(
    subject: Subject,
    build: Callable[[], nn.Module],
    make_step: Callable[[nn.Module, Callable[[], Tensor]], Step],
    device: torch.device,
    batch_size: int,
    precision: str = PRECISION,
) -> Step:
    """Another network, trained on the loss of ours."""
    with device:
        network, batch = build(), subject.batch(batch_size)
    task, draw = subject.task(network).to(device), Draw(0, batch.index, device)

    def loss() -> Tensor:
        with autocast(precision, device):
            return task.losses(batch, draw)["loss"].mean()

    return make_step(network, loss)


def plain_step(network: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    """AdamW with torch's defaults, and clipping; no averages."""
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


class DiffusersUNet(nn.Module):
    def __init__(self, subject: Pixels):
        super().__init__()
        from diffusers import UNet2DModel

        c = subject.config
        attends = [c.has_attention(level) for level in range(c.levels)]
        self.unet = UNet2DModel(
            sample_size=c.image_size,
            in_channels=3,
            out_channels=3,
            block_out_channels=tuple(c.level_channels),
            layers_per_block=c.num_res_blocks,
            down_block_types=tuple("AttnDownBlock2D" if each else "DownBlock2D" for each in attends),
            up_block_types=tuple("AttnUpBlock2D" if each else "UpBlock2D" for each in reversed(attends)),
            attention_head_dim=c.num_head_channels,
            downsample_type="resnet",
            upsample_type="resnet",
        )

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        return self.unet(x, t).sample


class Transformer(nn.Module):
    """Pre-norm layers on patches. It sees no timestep, which would cost nothing."""

    def __init__(self, subject: Pixels, width: int = 0):
        super().__init__()
        width = width or WIDTH
        self.patch = round(subject.config.image_size / TOKENS**0.5)
        values = 3 * self.patch**2
        layer = nn.TransformerEncoderLayer(
            width, width // HEAD, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        per_layer = 3 * (24 * TOKENS * width**2 + 4 * TOKENS**2 * width)  # FLOPs of both passes
        outside = 3 * 4 * TOKENS * values * width
        depth = round((flops_per_image(subject) - outside) / per_layer)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.linear_in, self.linear_out = nn.Linear(values, width), nn.Linear(width, values)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        rows = F.pixel_unshuffle(x, self.patch).flatten(2).transpose(1, 2)
        rows = self.linear_out(self.layers(self.linear_in(rows)))
        side = x.shape[2] // self.patch
        return F.pixel_shuffle(rows.transpose(1, 2).unflatten(2, (side, side)), self.patch)


# ------------------------------------------------------------------------------------------------------------ sampling


def sampling(
    subject: Pixels, steps: int, device: torch.device, batch_size: int, backend: str = "", graph: bool = False
) -> Step:
    """Images of a generator with text, with classifier-free guidance.

    backend: torch.compile's, which captures the network as one graph; empty = eager. graph: replay it as a CUDA graph.
    """
    with device:
        network = subject.network()
    for_inference(network.eval().requires_grad_(False), PRECISION)
    if backend:
        mode = "reduce-overhead" if graph else "default"
        compiled = torch.compile(network.forward, backend=backend, fullgraph=True, mode=mode)

        def forward(*args, **kwargs) -> Tensor:
            return compiled(*args, **kwargs).clone()  # a graph writes its next output into the same memory

        network.forward = forward  # type: ignore[method-assign]
    tokens = torch.ones(batch_size, subject.text.text_length, dtype=torch.long)
    cond, size = Conditioning(tokens=tokens, mask=tokens > 0), subject.config.image_size
    null = cond.drop(torch.ones(batch_size, dtype=torch.bool))
    batch = SampleBatch(PixelSignal(), (size, size), range(batch_size), cond, null)
    sampler = SamplerConfig("dpm++2m", steps)
    process = sampler.process(DiffusionConfig())

    def sample() -> Tensor:
        with autocast(PRECISION, device):
            return sample_batch(network, process, batch, sampler, GuidanceConfig(guidance_scale=3.0))

    return sample
