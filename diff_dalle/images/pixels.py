"""Conversion between uint8 images and the float tensors that networks compute with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..config import InputError


def to_uint8(images: Tensor) -> Tensor:
    """[N, C, H, W] in [-1, 1] → [N, H, W, C] uint8, rounded; values out of range are clipped."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def from_uint8(images: np.ndarray | Tensor) -> Tensor:
    """Images [N, H, W, C] uint8 → [N, C, H, W] float32 in [-1, 1], on the device of ``images``."""
    return from_levels(torch.as_tensor(images).permute(0, 3, 1, 2))


def from_levels(images: Tensor) -> Tensor:
    """uint8 of any shape → float32 in [-1, 1] of the same shape, on the same device."""
    return images.float().div_(127.5).sub_(1.0)  # in place: batches are large


def check_pixels(name: str, images: np.ndarray, shape: str) -> None:
    """InputError unless ``images`` is uint8 of a shape like ``shape``: "[H, W, 3]", or "[N, h, w, 3]"."""
    if images.dtype != np.uint8 or images.ndim != shape.count(",") + 1 or images.shape[-1] != 3:
        raise InputError(f"{name} is {images.dtype} of shape {list(images.shape)}, but must be uint8 {shape}")
