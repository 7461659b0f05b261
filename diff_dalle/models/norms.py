"""Norms with fp32 statistics and weights that return their input's dtype and layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .precision import autocast_disabled

GROUPS = 32  # of a group norm unless told otherwise, as in Guided-Diffusion


class GroupNorm32(nn.GroupNorm):
    """Group norm of [N, C, H, W] in fp32 (Wu & He 2018). gcd(groups, channels) groups when ``groups`` does not divide
    the channels.

    torch's CPU kernel supports both layouts and mixed dtypes, and a compiler fuses the norm with its neighbors in any
    layout. Elsewhere see ``native_keeps_layout``.
    """

    def __init__(self, channels: int, groups: int = GROUPS):
        super().__init__(math.gcd(groups, channels), channels)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(input.float()).to(input.dtype)
        if native_keeps_layout(input.device):
            return super().forward(input)
        return ChannelsLastGroupNorm.apply(input, self.weight, self.bias, self.num_groups, self.eps)


def native_keeps_layout(device: torch.device) -> bool:
    """Whether torch's own group norm keeps the channels-last layout.

    On CUDA, up to torch 2.13, it works on NCHW: it copies a channels-last input and returns NCHW, which the next
    convolution copies back. So it does on the meta device, where ``cost.py`` measures memory.
    """
    return device.type == "cpu"


class LayerNorm32(nn.LayerNorm):
    """Layer norm in fp32 (Ba et al. 2016)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


class ChannelsLastGroupNorm(torch.autograd.Function):
    """Group norm of a channels-last image in few operations on it: three forward and seven backward, and one conversion
    of each tensor in half precision. It keeps the image for the backward pass in its own dtype.

    Gradients are those of Wu & He (2018); there are none of second order.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        x = _by_group(image, groups)
        with autocast_disabled(image.device):
            variance, mean = torch.var_mean(x.to(weight.dtype), (1, 2, 4), correction=0, keepdim=True)
            rstd = (variance + eps).rsqrt()  # [N, 1, 1, groups, 1]
            scale = rstd * weight.unflatten(0, (groups, -1))
            shift = torch.addcmul(bias.unflatten(0, (groups, -1)), mean, scale, value=-1)
            out = torch.addcmul(shift, x, scale)  # converts x as it reads it
        ctx.save_for_backward(image, weight, mean, rstd)
        ctx.groups = groups
        return _to_image(out, image.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, weight, mean, rstd = ctx.saved_tensors
        x, g = _by_group(image, ctx.groups), _by_group(gradient, ctx.groups)
        with autocast_disabled(image.device):
            normalized = torch.addcmul(-mean * rstd, x, rstd)
            to_bias = g.sum((1, 2), keepdim=True, dtype=weight.dtype)  # [N, 1, 1, groups, channels per group]
            to_weight = (g * normalized).sum((1, 2), keepdim=True)
            # The gradient at the normalized image is g · weight; that of the norm removes its mean and its projection
            # on the normalized image, both over the group.
            by_weight = weight.unflatten(0, (ctx.groups, -1))
            height, width = image.shape[2:]
            removed, projected = (
                rstd * (by_weight * total).mean(4, keepdim=True) / (height * width) for total in (to_bias, to_weight)
            )
            to_image = torch.addcmul(-removed, normalized, -projected).addcmul_(g, rstd * by_weight)
        return _to_image(to_image, image.dtype), to_weight.sum(0).flatten(), to_bias.sum(0).flatten(), None, None


def _by_group(image: Tensor, groups: int) -> Tensor:
    """[N, C, H, W] → [N, H, W, groups, C / groups], without a copy for channels-last input."""
    return image.permute(0, 2, 3, 1).unflatten(3, (groups, -1))


def _to_image(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of ``_by_group``, in channels-last layout."""
    return x.flatten(3).permute(0, 3, 1, 2).to(dtype)
