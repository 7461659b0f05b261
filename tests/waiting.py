"""Checks that a piece of work waits for no device."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class CountTransfers(TorchDispatchMode):
    """Counts the operations that take something from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in (*args, out) if isinstance(value, torch.Tensor)}
        self.count += "cpu" in devices and len(devices) > 1
        return out


def transfers(step) -> list[int]:
    """How many operations of a first and a second call of ``step`` took something from the CPU to its device."""
    counts = []
    for _ in range(2):
        with CountTransfers() as counting:
            step()
        counts.append(counting.count)
    return counts


def run_without_waiting(step) -> None:
    """A second call of ``step``, whose tensors are on a CUDA device; torch raises when it makes the host wait."""
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
