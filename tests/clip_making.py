"""Tiny noised CLIPs with all parameters randomized, and captioned batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.resample import ContrastiveConfig
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.models.noised_clip import NoisedClip, NoisedClipConfig
from diff_dalle.randomness import Draw
from diff_dalle.tasks.contrastive import ContrastiveTask

VOCABULARY = 40
# 12 channels make 4 groups of 3: with one channel a group, the gradients of biases before a norm would be 0.
CONFIG = NoisedClipConfig(
    image_size=8,
    classifier_width=12,
    classifier_depth=1,
    classifier_channel_mult=(1, 2),
    classifier_attention_resolutions=(4,),
    classifier_num_heads=2,
    classifier_enc_attn_dim=12,
    classifier_enc_depth=2,
    classifier_enc_heads=3,
    text_length=7,
)
DROPOUT = {"classifier_dropout": 0.3, "dropout_text": 0.3}
ONE_PROCESS = World(SINGLE, torch.device("cpu"))


def make_clip(**changed) -> NoisedClip:
    torch.manual_seed(0)
    clip = NoisedClip(replace(CONFIG, **changed), VOCABULARY)
    with torch.no_grad():
        for parameter in clip.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return clip


def make_batch(index: Sequence[int]) -> Batch:
    """Images, and captions of 2 to 7 tokens, as functions of the position."""
    index = torch.tensor(list(index))
    draw = Draw(99, index)
    tokens = (torch.stack([draw.uniform(f"token {i}") for i in range(7)], 1) * VOCABULARY).long()
    mask = torch.arange(7) < 2 + (draw.uniform("length") * 6).long()[:, None]
    return Batch(draw.normal("image", (3, 8, 8)).tanh(), Conditioning(tokens=tokens, mask=mask), index)


def make_task(model: nn.Module | None = None, world: World = ONE_PROCESS, process=None, **config) -> ContrastiveTask:
    """A task in training mode, with dropout in both towers unless the model is given."""
    process = process or create_gaussian_diffusion(DiffusionConfig(diffusion_steps=8, noise_schedule="cosine"))
    return ContrastiveTask(model or make_clip(**DROPOUT), process, ContrastiveConfig(**config), world)


def with_draws(pieces: Sequence[Batch]) -> list[tuple[Batch, Draw]]:
    return [(piece, Draw(0, piece.index)) for piece in pieces]
