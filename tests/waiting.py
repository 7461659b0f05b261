"""Checks that the host does not wait for a device."""

from __future__ import annotations

import contextlib
from unittest import mock

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


class _Reads(TorchDispatchMode):
    """Collects the names of operations whose result depends on values: Python numbers, and shapes."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def reads(allowed=()):
    """A list of what reads values from tensors inside the block, as on a GPU would wait for it. A CPU has no operation
    for ``tolist``, ``cpu`` and ``numpy``, so the methods themselves are watched.

    allowed: tensors that are on the CPU in any case, and their views.
    """
    found: list[str] = []
    known = {tensor.untyped_storage().data_ptr() for tensor in allowed}

    def watched(name):
        method = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            if self.untyped_storage().data_ptr() not in known:
                found.append(name)
            return method(self, *args, **kwargs)

        return mock.patch.object(torch.Tensor, name, call)

    with contextlib.ExitStack() as stack:
        for name in ("tolist", "cpu", "numpy"):
            stack.enter_context(watched(name))
        stack.enter_context(_Reads(found))
        yield found
