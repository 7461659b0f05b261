"""A training step with activation checkpointing (``use_checkpoint``) against one that computes nothing twice.

The network is an upsampler to 256 pixels like that of the presets, but narrow and without text, so that two cores
suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from network_making import randomize
from torch import Tensor

from diff_dalle.batch import Conditioning
from diff_dalle.models.generator import Generator, GeneratorConfig, LowResConfig
from diff_dalle.models.layers import ResBlock, to_channels_last
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig

from .regression import SPREAD, Differences, gradients, pass_through, same_step

IMAGE_SIZE, FACTOR, WARM_UP_SIZE = 256, 4, 32
BATCH_SIZE = (
    4  # makes the largest tensors 32 MiB: glibc does not return freed smaller ones, which would distort the memory
)
NETWORK = DenoiserConfig(
    image_size=IMAGE_SIZE,
    num_channels=32,
    num_res_blocks=2,
    channel_mult=(1, 1, 2, 2),
    attention_resolutions=(32,),
    num_head_channels=32,
    resblock_updown=True,
)


def network(use_checkpoint: bool) -> Generator:
    """The network with equal weights for both values, none of them 0 (zero-initialized layers hide those before)."""
    torch.manual_seed(0)
    unet = replace(NETWORK, image_size=IMAGE_SIZE, use_checkpoint=use_checkpoint)
    model = Generator(
        GeneratorConfig(unet, TextEncoderConfig(enc_attn_dim=0), LowResConfig(small_size=IMAGE_SIZE // FACTOR)), 0
    )
    return to_channels_last(randomize(model, spread=SPREAD))


def step(model: Generator, size: int) -> Tensor:
    """Forward and backward pass on ``BATCH_SIZE`` images of ``size``×``size`` pixels. Returns the loss."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, BATCH_SIZE, 3, size, size, generator=generator)
    low_res = torch.randn(BATCH_SIZE, 3, size // FACTOR, size // FACTOR, generator=generator)
    level, blur = torch.linspace(0, 0.5, BATCH_SIZE), torch.zeros(BATCH_SIZE)
    cond = Conditioning(low_res=low_res, low_res_level=level, low_res_blur=blur)
    return pass_through(model, x, torch.linspace(0, 999, BATCH_SIZE), cond, target)[0]


def _work(model: Generator) -> Callable[[], Tensor]:
    step(model, WARM_UP_SIZE)  # allocates the libraries' own memory, which must not count as activations
    return lambda: step(model, IMAGE_SIZE)


def without_checkpoint() -> Callable[[], Tensor]:
    """All that the backward pass needs is kept, also the inputs of convolutions, which ``ResBlock`` computes again."""
    model = network(False)
    for block in model.modules():
        if isinstance(block, ResBlock):
            block.keeps_conv_inputs = True
    return _work(model)


def with_checkpoint() -> Callable[[], Tensor]:
    return _work(network(True))


def gate() -> Differences:
    models = [network(use_checkpoint) for use_checkpoint in (False, True)]
    return same_step([step(model, IMAGE_SIZE) for model in models], [*map(gradients, models)])
