"""Inputs of zeros with which ``cost.py`` measures stages B and C."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...batch import Conditioning
from .config import LatentUnetConfig
from .stage_b import StageBConfig


def zero_inputs(config: LatentUnetConfig, images: int, height: int, width: int) -> tuple[Tensor, Tensor, Conditioning]:
    """x, t and cond, on torch's default device, for latents of this size: captions of full length where the network
    reads them itself, and every condition that costs anything. (A map costs what its resized version costs.) With keys,
    as in training: torch's own dropout would save a mask of numbers."""
    x, t = torch.zeros(images, config.channels, height, width), torch.zeros(images)
    cond, length = Conditioning(dropout_keys=torch.zeros(images, dtype=torch.int64)), config.text.text_length
    if config.text.enc_attn_dim:
        tokens = torch.zeros(images, length, dtype=torch.int64)
        cond = replace(cond, tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))
    else:
        if config.states_width:
            cond = replace(cond, text_states=torch.zeros(images, length, config.states_width))
        if config.vector_width:
            cond = replace(cond, text_pooled=torch.zeros(images, config.vector_width))
    if isinstance(config, StageBConfig):
        cond = replace(cond, semantic=torch.zeros(images, config.semantic_channels, 1, 1))
    return x, t, cond
