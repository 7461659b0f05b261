"""A training step that computes activations a second time in the backward pass, against one that keeps them all.

The network is an up-sampler to 256 pixels like that of the presets, narrow and without text, so that two cores can
train it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..batch import Conditioning
from ..models.generator import Generator, GeneratorConfig
from ..models.layers import to_channels_last
from ..models.super_resolution import LowResConfig
from ..models.text_encoder import TextEncoderConfig
from ..models.unet import UNetConfig

IMAGE_SIZE, FACTOR, WARM_UP_SIZE = 256, 4, 32
BATCH_SIZE = 4  # so that the largest tensors have 32 MiB: glibc keeps freed smaller ones, which would count as memory
NETWORK = {
    "num_channels": 32, "num_res_blocks": 2, "channel_mult": (1, 1, 2, 2), "attention_resolutions": (32,),
    "num_head_channels": 32, "resblock_updown": True,
}  # fmt: skip


def network(use_checkpoint: bool) -> Generator:
    """The same weights either way, none of them 0 (as some of a new network are, which hides what lies behind)."""
    torch.manual_seed(0)
    unet = UNetConfig(image_size=IMAGE_SIZE, use_checkpoint=use_checkpoint, **NETWORK)
    model = Generator(
        GeneratorConfig(unet, TextEncoderConfig(enc_attn_dim=0), LowResConfig(small_size=IMAGE_SIZE // FACTOR)), 0
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    return to_channels_last(model)


def step(model: Generator, size: int) -> Tensor:
    """Forward and backward pass on ``BATCH_SIZE`` images of ``size`` pixels a side. Returns the loss."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, BATCH_SIZE, 3, size, size, generator=generator)
    low_res = torch.randn(BATCH_SIZE, 3, size // FACTOR, size // FACTOR, generator=generator)
    level, blur = torch.linspace(0, 0.5, BATCH_SIZE), torch.zeros(BATCH_SIZE)
    cond = Conditioning(low_res=low_res, low_res_level=level, low_res_blur=blur)
    model.zero_grad(set_to_none=True)
    loss = (model(x, torch.linspace(0, 999, BATCH_SIZE), cond) - target).square().mean()
    loss.backward()
    return loss.detach()


def _work(use_checkpoint: bool) -> Callable[[], Tensor]:
    model = network(use_checkpoint)
    step(model, WARM_UP_SIZE)  # so that the memory of the libraries' start is not taken for that of the activations
    return lambda: step(model, IMAGE_SIZE)


def keeping() -> Callable[[], Tensor]:
    return _work(False)


def recomputing() -> Callable[[], Tensor]:
    return _work(True)


def gate() -> dict[str, tuple[float, float]]:
    """Relative difference of the losses, and the largest of any parameter's gradient."""
    models = [network(use_checkpoint) for use_checkpoint in (False, True)]
    loss, other_loss = (step(model, IMAGE_SIZE) for model in models)
    pairs = zip(*([parameter.grad for parameter in model.parameters()] for model in models), strict=True)
    gradient = max(((b - a).norm() / a.norm()).item() for a, b in pairs)
    return {"losses": (((other_loss - loss).abs() / loss).item(), 1e-6), "gradients": (gradient, 1e-6)}
