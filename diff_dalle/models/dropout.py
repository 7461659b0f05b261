"""Dropout whose mask is a pure function of the sample, the layer and the element.

A sample has the same mask in any batch, process or micro-batch. A block that is recomputed (activation checkpointing,
gradient caching) gets the same mask again without a saved generator state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _signed(bits: int) -> int:
    """The int32 with the same 32 bits."""
    bits &= 0xFFFFFFFF
    return bits - (bits >> 31 << 32)


# The multipliers of C. Wellons's 32-bit mixer "lowbias32", and 2^32 / golden ratio to spread the salts.
_MULTIPLY_1, _MULTIPLY_2, _GOLDEN = _signed(0x7FEB352D), _signed(0x846CA68B), 0x9E3779B9


def _mix(x: Tensor) -> Tensor:
    """lowbias32 on int32: a bijection with statistically independent outputs. The masks make the shifts unsigned."""
    x = (x ^ (x >> 16 & 0xFFFF)) * _MULTIPLY_1
    x = (x ^ (x >> 15 & 0x1FFFF)) * _MULTIPLY_2
    return x ^ (x >> 16 & 0xFFFF)


@torch.no_grad()
def keep_mask(keys: Tensor, salt: int, count: int, drop: float) -> Tensor:
    """The dropout mask: [N, count] bool, True = keep, with probability 1 - drop (rounded to a multiple of 2^-16).

    keys: [N] int64, one random key per sample.
    salt: the layer's number; layers with different salts have independent masks.

    Element i of a sample does not depend on ``count``. All arithmetic is int32 and wraps around.
    """
    low, high = keys.contiguous().view(torch.int32).unflatten(0, (-1, 2)).unbind(1)
    offset = _mix(_mix(low + _signed(salt * _GOLDEN)) ^ high)[:, None]
    factor = _mix(_mix(high - _signed(salt * _GOLDEN)) ^ low)[:, None] | 1
    counter = _mix(torch.arange((count + 1) // 2, dtype=torch.int32, device=keys.device))
    # The counter is mixed once for all samples, so that each element costs one more round only.
    bits = (counter ^ offset).mul_(factor)
    bits = (bits ^ (bits >> 16 & 0xFFFF)).mul_(_MULTIPLY_1)
    bits ^= bits >> 15 & 0x1FFFF
    # Each 16-bit half decides one element. Comparisons use the upper half of the word.
    limit = (min(round(drop * 2**16), 2**16 - 1) - 2**15) << 16
    return torch.stack([bits >= limit, bits << 16 >= limit], 2).flatten(1)[:, :count]


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) whose mask is derived from the samples' keys.

    drop: probability that an element is zeroed, in [0, 1). ``number_dropouts`` gives each layer its own salt.
    """

    def __init__(self, drop: float):
        super().__init__()
        self.drop, self.salt = drop, 0

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """x: [N, …], elements numbered in row-major order; keys: [N] int64, or None to use torch's generator."""
        if not self.training or self.drop == 0:
            return x
        if keys is None:
            return F.dropout(x, self.drop, training=True)
        keep = keep_mask(keys, self.salt, x[0].numel(), self.drop).view(x.shape)
        return torch.where(keep, x * (1 / (1 - self.drop)), 0)


def number_dropouts(network: nn.Module) -> None:
    """Set the salts of a network's dropout layers: 1, 2, … in order of registration."""
    layers = [module for module in network.modules() if isinstance(module, Dropout)]
    for salt, layer in enumerate(layers, start=1):
        layer.salt = salt
