"""Checks that the host does not wait for a device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class CountTransfers(TorchDispatchMode):
    """Counts transfers from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in (*args, out) if isinstance(value, torch.Tensor)}
        self.count += "cpu" in devices and len(devices) > 1
        return out


def transfers(step) -> list[int]:
    """The number of transfers from the CPU to the device in a first and a second call of ``step``."""
    counts = []
    for _ in range(2):
        with CountTransfers() as counting:
            step()
        counts.append(counting.count)
    return counts


def run_without_waiting(step) -> None:
    """Call ``step``, whose tensors are on a CUDA device, twice; the second time, synchronization raises an error."""
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
