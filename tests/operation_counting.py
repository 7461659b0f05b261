"""Counts operations on tensors (on a GPU, a kernel or a copy each, except views) and conversions of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# Operations on a storage that exists already, or that allocate one without writing to it.
FREE = {
    "view", "_unsafe_view", "_reshape_alias", "as_strided", "expand", "permute", "transpose", "t", "unsqueeze",
    "squeeze", "select", "slice", "unbind", "split", "split_with_sizes", "detach", "alias", "lift_fresh", "empty",
    "empty_like", "empty_strided",
}  # fmt: skip


class _Counting(TorchDispatchMode):
    def __init__(self, least: int):
        super().__init__()
        self.least, self.counts = least, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        sizes = [value.numel() for value in (*args, out) if isinstance(value, torch.Tensor)]
        if name not in FREE and max(sizes, default=0) >= self.least:
            self.counts[name] += 1
        return out


def operations(work: Callable[[], object], least: int = 0) -> Counter:
    """The number of operations of each name in ``work()`` that read or write a tensor of ``least`` elements or more."""
    with _Counting(least) as counting:
        work()
    return counting.counts


class _Conversions(TorchDispatchMode):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.storages = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.count += args[0].untyped_storage().data_ptr() in self.storages
        return func(*args, **(kwargs or {}))


def parameter_conversions(network: nn.Module, work: Callable[[], object]) -> int:
    """How often ``work()`` converts a parameter of the network to another dtype or device."""
    with _Conversions(network) as conversions:
        work()
    return conversions.count
