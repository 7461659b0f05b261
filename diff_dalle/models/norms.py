"""Norms with fp32 statistics and weights that return their input's dtype and layout, and a batch norm that gives a
sample the same result in any batch, micro-batch and process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import kernels
from .precision import autocast_disabled

GROUPS = 32  # of a group norm unless told otherwise, as in Guided-Diffusion


class GroupNorm32(nn.GroupNorm):
    """Group norm of [N, C, H, W] in fp32 (Wu & He 2018), optionally with what follows it in residual blocks: a scale
    and shift per sample and channel, and a SiLU. gcd(groups, channels) groups when ``groups`` does not divide the
    channels.

    A compiler fuses all of it with its neighbors, in any layout. Without one see ``FusedGroupNorm``.
    """

    in_fp32 = True  # see ``units.parts_of``

    def __init__(self, channels: int, groups: int = GROUPS):
        super().__init__(math.gcd(groups, channels), channels)

    def forward(self, input: Tensor, scale_shift: Tensor | None = None, silu: bool = False) -> Tensor:
        """scale_shift: [N, 2 · C], scales s and shifts t of norm · (1 + s) + t; None = neither. silu: apply a SiLU."""
        if scale_shift is not None:
            scale_shift = scale_shift.to(self.weight.dtype)
        if torch.compiler.is_compiling():
            out = super().forward(input.to(self.weight.dtype))
            if scale_shift is not None:
                scale, shift = scale_shift[:, :, None, None].chunk(2, dim=1)
                out = torch.addcmul(shift, out, 1 + scale)
            return (F.silu(out) if silu else out).to(input.dtype)
        if scale_shift is None and not silu and native_keeps_layout(input.device) and input.dtype == self.weight.dtype:
            return super().forward(input)
        return FusedGroupNorm.apply(input, self.weight, self.bias, scale_shift, self.num_groups, self.eps, silu)


def output_again(out: Tensor) -> Callable[[], Tensor] | None:
    """What computes ``out`` again in the backward pass, to the same bits, if it is the output of a ``FusedGroupNorm``
    that has one; else None. A compiler decides by itself what to compute again."""
    if torch.compiler.is_compiling() or not isinstance(out.grad_fn, FusedGroupNorm._backward_cls):
        return None
    return partial(FusedGroupNorm.again, out.grad_fn)


def native_keeps_layout(device: torch.device) -> bool:
    """Whether torch's own group norm keeps the channels-last layout in its forward pass.

    On CUDA, up to torch 2.13, it works on NCHW: it copies a channels-last input and returns NCHW, which the next
    convolution copies back. So it does on the meta device, where ``cost.py`` measures memory.
    """
    return device.type == "cpu"


class LayerNorm32(nn.LayerNorm):
    """Layer norm in fp32 (Ba et al. 2016)."""

    in_fp32 = True  # see ``units.parts_of``

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


class FusedGroupNorm(torch.autograd.Function):
    """Group norm, scale and shift, and SiLU of a channels-last image, in few operations on it.

    With a factor a and an offset b per sample and channel, all of it is silu(a · image + b). It keeps the image alone
    for the backward pass, in its own dtype, and computes the rest again, which takes as long as reading it would.

    Gradients are those of Wu & He (2018); there are none of second order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale_shift: Tensor | None,
        groups: int,
        eps: float,
        silu: bool,
    ) -> Tensor:
        x, factor, offset = _operand(image, weight.dtype), None, None
        ctx.groups, ctx.eps, ctx.silu = groups, eps, silu
        if kernels.run_on(image.device):
            from .kernels import group_norm

            found = group_norm.statistics(x, weight, bias, scale_shift, groups, eps)
            ctx.save_for_backward(x, weight, bias, *found[:2], scale_shift, *found[2:])
            return group_norm.apply(x, *found[2:], silu)
        with autocast_disabled(image.device):
            if native_keeps_layout(image.device):
                out, mean, rstd = _natively(x, weight, bias, scale_shift, groups, eps)
            else:
                by_group = _rows(x).unflatten(3, (groups, -1))
                variance, mean = torch.var_mean(by_group.to(weight.dtype), (1, 2, 4), correction=0)
                rstd = (variance + eps).rsqrt()  # [N, groups]
                factor, offset = _affine(weight, bias, mean, rstd, scale_shift)
                out = torch.addcmul(offset, _rows(x), factor).permute(0, 3, 1, 2)
            if silu:
                F.silu(out, inplace=True)
        ctx.save_for_backward(image, weight, bias, mean, rstd, scale_shift, factor, offset)
        return out.to(image.dtype)

    @staticmethod
    @torch.no_grad()
    def again(node: Any) -> Tensor:
        """The output of a forward pass, by the same operations. node: its node in the graph, before it is freed."""
        image, weight, bias, _, _, scale_shift, factor, offset = node.saved_tensors
        x = _operand(image, weight.dtype)
        if kernels.run_on(image.device):
            from .kernels import group_norm

            return group_norm.apply(x, factor, offset, node.silu)
        with autocast_disabled(image.device):
            if factor is None:
                out, *_ = _natively(x, weight, bias, scale_shift, node.groups, node.eps)
            else:
                out = torch.addcmul(offset, _rows(x), factor).permute(0, 3, 1, 2)
            return (F.silu(out, inplace=True) if node.silu else out).to(image.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        image, weight, bias, mean, rstd, scale_shift, factor, offset = ctx.saved_tensors
        image, gradient, dtype = *(_operand(each, weight.dtype) for each in (image, gradient)), image.dtype
        if kernels.run_on(image.device):
            from .kernels import group_norm

            found = mean, rstd, factor, offset
            to_image, *to_others = group_norm.norm_gradients(
                image, gradient, weight, bias, scale_shift, found, ctx.silu
            )
            return to_image, *to_others, None, None, None
        x, g, groups = _rows(image), _rows(gradient), (ctx.groups, -1)
        native = native_keeps_layout(image.device) and scale_shift is None  # the faster one, for no scale and shift
        with autocast_disabled(image.device):
            if factor is None and (ctx.silu or not native):
                factor, offset = _affine(weight, bias, mean, rstd, scale_shift)
            if ctx.silu:
                out = torch.addcmul(offset, x, factor)
                g = torch.ops.aten.silu_backward.grad_input(g.to(out.dtype), out, grad_input=out)
            if native:
                g, sizes = g.permute(0, 3, 1, 2), (*_sizes(image), ctx.groups)
                found = torch.ops.aten.native_group_norm_backward(g, image, mean, rstd, weight, *sizes, [True] * 3)
                return found[0].to(dtype), *found[1:], None, None, None, None
            # The gradients at the offset and at the normalized image's factor, [N, groups, channels per group].
            to_offset = g.sum((1, 2), dtype=weight.dtype).unflatten(1, groups)
            with_image = torch.addcmul(weight.new_zeros(1), g, x).sum((1, 2)).unflatten(1, groups)  # in weight's dtype
            mean, rstd = mean[:, :, None], rstd[:, :, None]
            to_factor = torch.addcmul(with_image, mean, to_offset, value=-1) * rstd
            by_weight = weight.unflatten(0, groups)
            to_scale_shift = None
            if scale_shift is None:
                to_weight, to_bias = to_factor, to_offset
            else:
                factors = 1 + scale_shift.chunk(2, dim=1)[0].unflatten(1, groups)
                to_scale = torch.addcmul(bias.unflatten(0, groups) * to_offset, by_weight, to_factor)
                to_scale_shift = torch.cat([to_scale.flatten(1), to_offset.flatten(1)], 1)
                to_weight, to_bias, by_weight = factors * to_factor, factors * to_offset, factors * by_weight
            # The gradient at the normalized image is g · by_weight; that of the norm removes its mean and its
            # projection on the normalized image, both over the group.
            removed, projected = (
                rstd * (by_weight * total).mean(2, keepdim=True) / x[0, :, :, 0].numel()
                for total in (to_offset, to_factor)
            )
            projected = -rstd * projected
            constant = -torch.addcmul(removed, mean, projected)
            constant, projected = (
                each.expand_as(to_offset).flatten(1)[:, None, None] for each in (constant, projected)
            )
            to_image = torch.addcmul(constant, x, projected).addcmul_(g, factor)
        return (
            to_image.permute(0, 3, 1, 2).to(dtype),
            to_weight.sum(0).flatten(),
            to_bias.sum(0).flatten(),
            to_scale_shift,
            *(None, None, None),
        )


def _natively(
    x: Tensor, weight: Tensor, bias: Tensor, scale_shift: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, scale and shift by torch's kernel, which reads the image once; mean and 1 / standard deviation of each
    group."""
    out, mean, rstd = torch.native_group_norm(x, weight, bias, *_sizes(x), groups, eps)
    if scale_shift is not None:
        scale, shift = scale_shift[:, :, None, None].chunk(2, dim=1)
        torch.addcmul(shift, out, 1 + scale, out=out)
    return out, mean, rstd


def _affine(
    weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, scale_shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What norm, scale and shift amount to: factors and offsets [N, 1, 1, C] of an image. mean, rstd: [N, groups]."""
    factor = rstd[:, :, None] * weight.unflatten(0, (mean.shape[1], -1))
    offset = torch.addcmul(bias.unflatten(0, (mean.shape[1], -1)), mean[:, :, None], factor, value=-1).flatten(1)
    factor = factor.flatten(1)
    if scale_shift is not None:
        scale, shift = scale_shift.chunk(2, dim=1)
        factor, offset = torch.addcmul(factor, factor, scale), torch.addcmul(shift, offset, 1 + scale)
    return factor[:, None, None], offset[:, None, None]


def _sizes(image: Tensor) -> tuple[int, int, int]:
    """N, C and H · W."""
    return image.shape[0], image.shape[1], image.shape[2:].numel()


def _rows(image: Tensor) -> Tensor:
    """[N, C, H, W] → [N, H, W, C], without a copy."""
    return image.permute(0, 2, 3, 1)


def _operand(image: Tensor, dtype: torch.dtype) -> Tensor:
    """On a CPU the image in fp32 and channels last: kernels would convert it at each use, and torch's norm relies on
    one layout, also of dimensions of length 1, whose strides ``contiguous`` leaves as they are. Triton's kernels rely
    on it too, but convert as they read, as do torch's on CUDA."""
    if kernels.run_on(image.device):
        dtype = image.dtype
    elif not native_keeps_layout(image.device):
        return image
    channels, height, width = image.shape[1:]
    if image.dtype == dtype and image.stride() == (channels * height * width, 1, channels * width, channels):
        return image
    return torch.empty_like(image, dtype=dtype, memory_format=torch.channels_last).copy_(image)


MOMENTUM = 0.1  # of the running statistics, after the first batches


class RunningNorm(nn.BatchNorm2d):
    """Batch norm (Ioffe & Szegedy 2015) that normalizes by the running statistics in training too.

    The batch's own statistics would make what is learned depend on how the batch is cut and dealt to processes. The
    running ones follow outside the forward pass: it gives every sample's moments, and ``update`` takes those of the
    whole batch after the step. Parameters and buffers are those of ``nn.BatchNorm2d``.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, input: Tensor, moments: list[Tensor] | None = None) -> Tensor:
        """[N, C, H, W] → the same shape. Appends to ``moments``, if given, mean and variance of each sample and
        channel, over the positions: [N, 2C] float32, without gradient."""
        if moments is not None:
            variance, mean = torch.var_mean(input.detach().float(), (2, 3), correction=0)
            moments.append(torch.cat([mean, variance], 1))
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Move the running statistics towards those of a batch: moments [N, 2C] of samples with equally many positions.

        The first ten batches are averaged evenly, so that the initial statistics do not count. Moments that are not
        finite, as in a step that the optimizer skips, change nothing.
        """
        finite = moments.isfinite().all()
        mean, variance = _of_batch(torch.where(finite, moments, 0.0))
        self.num_batches_tracked += finite
        weight = finite * (1 / self.num_batches_tracked.clamp(min=1).float()).clamp(min=MOMENTUM)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)

    @torch.no_grad()
    def of_outputs(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [C] of what the norm now makes of a batch of inputs. moments: see ``update``."""
        mean, variance = _of_batch(moments)
        factor = (self.running_var + self.eps).rsqrt()
        mean = (mean - self.running_mean) * factor
        if self.affine:
            mean, factor = torch.addcmul(self.bias, mean, self.weight), factor * self.weight
        return mean, variance * factor.square()


def _of_batch(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] over samples with equally many positions, of their moments [N, 2C]."""
    means, variances = moments.chunk(2, dim=1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)
