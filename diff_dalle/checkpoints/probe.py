"""How the cost of a network is found: a forward pass on zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import Conditioning


@dataclass(frozen=True)
class Probe:
    """A forward pass on zeros that measures a network's cost.

    sizes:           image resolution in pixels, and the resolution of the crops that are trained on.
    forward:         (network, number of images, resolution) → output, on torch's default device.
    checkpoint_flag: the setting that turns activation checkpointing on, and ``checkpointed`` whether it is set.
    with_checkpoint: the settings with that flag on or off.
    """

    sizes: tuple[int, int]
    forward: Callable[[Any, int, int], Tensor]
    checkpoint_flag: str
    checkpointed: bool
    with_checkpoint: Callable[[bool], Any]


def empty_captions(count: int, length: int) -> Conditioning:
    tokens = torch.zeros(count, length, dtype=torch.int64)
    return Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))


def empty_images(count: int, channels: int, height: int, width: int | None = None) -> Tensor:
    return torch.zeros(count, channels, height, width or height)
