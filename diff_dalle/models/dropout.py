"""Dropout whose mask is a pure function of the sample, the layer and the element.

A sample has the same mask in any batch, process or micro-batch. A block that is recomputed (activation checkpointing,
gradient caching) gets the same mask again without a saved generator state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import kernels


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return bits - (bits >> 63 << 64)


# 2^64 / golden ratio, a multiplier of SplitMix64 (Steele et al. 2014), and the one of D. Lea's 64-bit mixer.
_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = (
    _signed(bits) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xDABA0B6EB09322E3)
)


@torch.no_grad()
def layer_numbers(keys: Tensor, salts: Tensor) -> tuple[Tensor, Tensor]:
    """A random offset and a random odd factor of every sample and layer: int64, [N, 1] each for one salt, [N, L] for
    several.

    keys:  [N] int64, one random key per sample.
    salts: the layers' numbers, int64 [L], or a scalar, which may be on the CPU; layers with different salts have
           independent masks.
    """
    offset = keys[:, None] ^ salts * _GOLDEN
    for multiplier in (_MULTIPLY_1, _MULTIPLY_2):
        offset = (offset ^ offset >> 32) * multiplier
    offset = offset ^ offset >> 32
    return offset, offset * _GOLDEN | 1


@torch.no_grad()
def keep_mask(offset: Tensor, factor: Tensor, count: int, drop: float) -> Tensor:
    """The dropout mask: [N, count] bool, True = keep, with probability 1 - drop (rounded to a multiple of 2^-16).

    offset, factor: [N, 1], of ``layer_numbers``.

    Element i of a sample does not depend on ``count``. All arithmetic is int64 and wraps around.
    """
    # Each 64-bit word is hashed for four elements. What is computed here once per word costs as much as the layer
    # itself, so one round must do: in the first fold XOR breaks the linearity in the counter, which the product cannot;
    # the product spreads all bits upwards; the second fold brings the well-mixed upper half down.
    counter = torch.arange((count + 3) // 4, device=offset.device)
    words = torch.addcmul(offset, counter, factor)
    words ^= words >> 32
    words *= _MULTIPLY_2
    words += words >> 32
    return (words.view(torch.int16) >= _limit(drop))[:, :count]


def _limit(drop: float) -> int:
    """Of all int16, a share of ``drop`` is below it."""
    return min(round(drop * 2**16), 2**16 - 1) - 2**15


class _SharedNumbers:
    """``layer_numbers`` of a network's layers, salts 1 … ``layers``, for the keys that were asked for last: the first
    layer that asks has them computed for all, in as many operations as for one."""

    def __init__(self, layers: int):
        self.layers = layers
        self.keys: Tensor | None = None
        self.numbers: tuple[Tensor, Tensor]

    def of(self, keys: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        if keys is not self.keys:
            salts = torch.arange(1, self.layers + 1, device=keys.device)
            self.keys, self.numbers = keys, layer_numbers(keys, salts)
        offsets, factors = self.numbers
        return offsets[:, layer : layer + 1], factors[:, layer : layer + 1]


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) whose mask is derived from the samples' keys.

    drop: probability that an element is zeroed, in [0, 1). ``number_dropouts`` gives each layer its own salt.
    """

    def __init__(self, drop: float):
        super().__init__()
        self.drop = drop
        # A tensor, because torch.compile would compile a block again for each number; on the CPU and no buffer, because
        # it is neither a weight nor moved, saved or exchanged between processes.
        self.salt = torch.zeros((), dtype=torch.int64, device="cpu")
        self.shared: tuple[_SharedNumbers, int] | None = None  # with the network's other layers, and its place there

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """x: [N, …], elements numbered in row-major order; keys: [N] int64, or None to use torch's generator."""
        return self.drawn(x, keys)(x)

    def drawn(self, x: Tensor, keys: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The dropout of x as a function, which has the same mask whenever it is called. Arguments: see ``forward``."""
        if not self.training or self.drop == 0:
            return _unchanged
        if keys is None:
            return F.dropout(torch.ones_like(x), self.drop, training=True).mul
        if self.shared is None or torch.compiler.is_compiling():  # a compiler fuses them with the mask
            numbers = layer_numbers(keys, self.salt)
        else:
            shared, place = self.shared
            numbers = shared.of(keys, place)
        scale = 1 / (1 - self.drop)
        if not torch.compiler.is_compiling() and kernels.run_on(x.device):
            from .kernels.dropout import KeyedDropout

            return lambda x: KeyedDropout.apply(x, *numbers, _MULTIPLY_2, _limit(self.drop), scale)
        keep = keep_mask(*numbers, x[0].numel(), self.drop).reshape(x.shape)
        return lambda x: torch.where(keep, x * scale, 0)


def _unchanged(x: Tensor) -> Tensor:
    return x


def number_dropouts(network: nn.Module) -> None:
    """Set the salts of a network's dropout layers: 1, 2, … in order of registration."""
    layers = [module for module in network.modules() if isinstance(module, Dropout)]
    shared = _SharedNumbers(len(layers))
    for place, layer in enumerate(layers):
        layer.salt, layer.shared = torch.tensor(place + 1, device="cpu"), (shared, place)
