"""Random numbers as a pure function of (seed, position, purpose).

Nothing here has state: a sample gets the same crop, timestep, noise and dropout in any process, worker and micro-batch,
so a run resumes exactly and does not depend on the number of processes.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .config import Fault, InputError

if TYPE_CHECKING:  # settings and orders need no torch
    import torch
    from torch import Tensor

# SplitMix64 (Steele et al. 2014): the increment, 2^64 / golden ratio, and (shift, multiplier) of its output function.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _signed(bits: np.uint64) -> int:
    """The int64 with the same 64 bits."""
    return int(bits.astype(np.int64))


_ROUNDS = ((30, _signed(_MIX_1)), (27, _signed(_MIX_2)), (31, None))  # of the output function, for tensors
_STEP = _signed(_GOLDEN)

MAX_SEED = 2**63 - 1  # seeds are positions too, which are int64


def check_seeds(seeds: Iterable[int], name: str = "seed") -> None:
    """InputError for a seed below 0 or above ``MAX_SEED``; ``name`` is the setting to change."""
    for seed in seeds:
        if not 0 <= seed <= MAX_SEED:
            raise InputError(Fault(name, f"must lie between 0 and 2^63 - 1 ({MAX_SEED})", seed))


def mix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function on an array of uint64: a bijection with independent-looking results."""
    with np.errstate(over="ignore"):  # 64-bit wrap-around is intended
        z = np.asarray(values, dtype=np.uint64) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))


@functools.lru_cache(maxsize=1024)
def _key(seed: int, purpose: str) -> np.ndarray:
    """The key of a stream: uint64 [1]. (An array, because numpy warns about overflow on scalars.)"""
    check_seeds([seed])
    name = np.frombuffer(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), dtype="<u8")
    # Mixed twice: with a plain XOR of mixed seed and mixed position, seed 1 at position 2 would equal seed 2 at 1.
    return mix64(mix64(np.array([seed], dtype=np.uint64)) ^ name)


def random_bits(seed: int, purpose: str, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One uint64 per position, uniform over all 64-bit values."""
    return mix64(mix64(np.asarray(positions, dtype=np.uint64)) ^ _key(seed, purpose))


def random_uniform(seed: int, purpose: str, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per position."""
    return random_uniforms(seed, [purpose], positions)[:, 0]


def random_uniforms(seed: int, purposes: Sequence[str], positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """``random_uniform`` for several purposes at once: float64 [n, purposes]."""
    keys = np.concatenate([_key(seed, purpose) for purpose in purposes])
    bits = mix64(mix64(np.asarray(positions, dtype=np.uint64))[:, None] ^ keys)
    return (bits >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, purpose: str, n: int) -> np.ndarray:
    """A permutation of 0..n-1 as int64: the argsort of n random keys. The same in every version of numpy."""
    return np.argsort(random_bits(seed, purpose, np.arange(n, dtype=np.uint64)), kind="stable")


def splitmix64(keys: Tensor, count: int) -> Tensor:
    """The first ``count`` outputs of SplitMix64 seeded with each key: int64 [N] → int64 [N, count].

    Tensor operations on int64, which wraps around, so the values are the same on every device. The masks make the
    shifts unsigned.
    """
    import torch

    z = torch.add(keys[:, None], torch.arange(1, count + 1, device=keys.device), alpha=_STEP)
    shifted = torch.empty_like(z)
    for shift, multiplier in _ROUNDS:
        z ^= torch.bitwise_right_shift(z, shift, out=shifted).bitwise_and_(2 ** (64 - shift) - 1)
        if multiplier is not None:
            z *= multiplier
    return z


def normal_pairs(bits: Tensor) -> Tensor:
    """Standard normal numbers, two from each uniform int64: [N, M] → float32 [N, 2 · M] (Box & Muller 1958).

    The lower half of the bits gives the radius, the upper half the angle. Radii are at most 6.7, which a standard
    normal number exceeds once in 4 · 10^10. Devices differ in the last digits of logarithm, sine and cosine: by less
    than 2e-6.
    """
    import torch

    words = bits.view(torch.int32).unflatten(1, (-1, 2))  # [N, M, 2]
    radius = words[..., 0].float().abs_().add_(0.5).mul_(2.0**-31).log_().mul_(-2).sqrt_()
    angle = words[..., 1].float().mul_(math.pi * 2.0**-31)
    pairs = torch.empty(*radius.shape, 2, dtype=torch.float32, device=bits.device)
    torch.mul(radius, angle.cos(), out=pairs[..., 0])
    torch.mul(radius, angle.sin_(), out=pairs[..., 1])
    return pairs.flatten(1)


class Draw:
    """Every random number of a batch of samples.

    seed:   the run's seed.
    index:  [N] int64 on the CPU, the samples' positions.
    device: device of the returned tensors. The numbers are the same on every device; normal ones to ``normal_pairs``'s
            rounding.
    """

    def __init__(self, seed: int, index: Tensor, device: torch.device | str = "cpu"):
        import torch

        self.seed, self.index = seed, index
        self.device = torch.device(device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """``index`` on the device."""
        return self.moved(self.index)

    def moved(self, values: Tensor) -> Tensor:
        """Values of the CPU on the device, which is not waited for."""
        pinned = values.pin_memory() if self.device.type == "cuda" else values  # a copy from other memory waits
        return pinned.to(self.device, non_blocking=True)

    @functools.cached_property
    def _mixed(self) -> Tensor:
        return splitmix64(self.positions, 1)[:, 0]

    def keys(self, purpose: str) -> Tensor:
        """[N] int64, uniform over all 64-bit values."""
        import torch

        if self.device.type == "cpu":
            return torch.from_numpy(random_bits(self.seed, purpose, self.index.numpy()).view(np.int64))
        return splitmix64(self._mixed ^ _signed(_key(self.seed, purpose)[0]), 1)[:, 0]

    def uniform(self, purpose: str) -> Tensor:
        """[N] float64 in [0, 1) (float32 where the device has no float64)."""
        import torch

        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return (self.keys(purpose) >> 11 & (2**53 - 1)).to(dtype) * 2.0**-53

    def uniforms(self, purposes: Sequence[str]) -> dict[str, Tensor]:
        """``uniform`` for many purposes, in one copy to the device."""
        import torch

        values = torch.from_numpy(random_uniforms(self.seed, purposes, self.index.numpy()))
        if self.device.type == "mps":
            values = values.float()
        return dict(zip(purposes, self.moved(values).unbind(1), strict=True))

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """[N, *shape] float32 standard normal numbers."""
        size = math.prod(shape)
        numbers = normal_pairs(splitmix64(self.keys(purpose), (size + 1) // 2))
        return numbers[:, :size].reshape(-1, *shape)
