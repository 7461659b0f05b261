"""Checks that the host does not wait for a device."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
on_gpu = pytest.mark.gpu  # of tests on ``DEVICE``: scripts/gpu_check.sh runs them


def needs_cuda(test):
    return on_gpu(pytest.mark.skipif(not GPU, reason="needs a CUDA device")(test))


class CountTransfers(TorchDispatchMode):
    """Counts transfers from the CPU to another device, and those that the host waits for."""

    def __init__(self):
        super().__init__()
        self.count = self.waiting = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        devices = {value.device.type for value in (*args, out) if isinstance(value, torch.Tensor)}
        if "cpu" in devices and len(devices) > 1:
            self.count += 1
            self.waiting += not ((kwargs or {}).get("non_blocking") or args[2:3] == (True,))  # of _to_copy; of copy_
        return out


class CountNumbers(TorchFunctionMode):
    """Counts tensors that are made of Python numbers on another device than the CPU, for which the host waits."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor):
            self.count += out.device.type != "cpu"
        return out


def transfers(step) -> list[int]:
    """The number of transfers from the CPU to the device in a first and a second call of ``step``."""
    counts = []
    for _ in range(2):
        with CountTransfers() as counting:
            step()
        counts.append(counting.count)
    return counts


@contextlib.contextmanager
def no_waiting():
    """Synchronization with a CUDA device raises an error inside the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_without_waiting(step) -> None:
    """Call ``step``, whose tensors are on a CUDA device, twice, the second time with ``no_waiting``."""
    step()
    with no_waiting():
        step()


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
