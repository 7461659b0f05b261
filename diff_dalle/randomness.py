"""Random numbers as a pure function of (seed, position, purpose).

Nothing here has state: a sample gets the same crop, timestep, noise and dropout in any process, worker and micro-batch,
so a run resumes exactly and does not depend on the number of processes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the increment of SplitMix64 (Steele et al. 2014)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


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
    name = np.frombuffer(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), dtype="<u8")
    # Mixed twice: with a plain XOR of mixed seed and mixed position, seed 1 at position 2 would equal seed 2 at 1.
    return mix64(mix64(np.array([seed % 2**64], dtype=np.uint64)) ^ name)


def random_bits(seed: int, purpose: str, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One uint64 per position, uniform over all 64-bit values."""
    return mix64(mix64(np.asarray(positions, dtype=np.uint64)) ^ _key(seed, purpose))


def random_uniform(seed: int, purpose: str, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) per position."""
    return (random_bits(seed, purpose, positions) >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, purpose: str, n: int) -> np.ndarray:
    """A permutation of 0..n-1 as int64: the argsort of n random keys. The same in every version of numpy."""
    return np.argsort(random_bits(seed, purpose, np.arange(n, dtype=np.uint64)), kind="stable")


class Draw:
    """Every random number of a batch of samples.

    seed:   the run's seed.
    index:  [N] int64 on the CPU, the samples' positions.
    device: device of the returned tensors. Normal numbers come from its own generator and so differ between CPU and
            GPU; all other numbers are the same on every device.
    """

    def __init__(self, seed: int, index: Tensor, device: torch.device | str = "cpu"):
        self.seed = seed
        self.positions = index.numpy()
        self.device = torch.device(device)

    def keys(self, purpose: str) -> Tensor:
        """[N] int64, uniform over all 64-bit values."""
        bits = random_bits(self.seed, purpose, self.positions).view(np.int64)
        return torch.from_numpy(bits).to(self.device, non_blocking=True)

    def uniform(self, purpose: str) -> Tensor:
        """[N] float64 in [0, 1) (float32 where the device has no float64)."""
        values = torch.from_numpy(random_uniform(self.seed, purpose, self.positions))
        if self.device.type == "mps":
            values = values.float()
        return values.to(self.device, non_blocking=True)

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """[N, *shape] float32 standard normal numbers."""
        out = torch.empty(len(self.positions), *shape, device=self.device)
        generator = torch.Generator(self.device)
        for row, bits in zip(out, random_bits(self.seed, purpose, self.positions).tolist(), strict=True):
            torch.randn(tuple(shape), generator=generator.manual_seed(bits >> 1), out=row)
        return out
