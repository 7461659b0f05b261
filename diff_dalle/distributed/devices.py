"""Which device a process computes on, with which arithmetic, and how the C library hands out the CPU's memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..config import Fault, InputError, quantity
from .rendezvous import SINGLE, ProcessInfo

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
_LARGEST_KEPT = 32 << 20  # bytes; glibc accepts no more
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

_allow_tf32 = False  # of this process, as ``use_device`` was told


def pick_device(name: str | torch.device, place: ProcessInfo = SINGLE) -> torch.device:
    """The device that the setting names, for the process ``place``. InputError when it is not available."""
    name = str(name)
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next((kind for kind, is_there in found.items() if is_there), "cpu")
    kind, _, number = name.partition(":")
    if not found.get(kind, True):
        raise InputError(Fault("device", f"must be cpu, because torch finds no {kind.upper()} device", name))
    if kind != "cuda":
        return torch.device(name)
    count = torch.cuda.device_count()
    if number:
        return _numbered(int(number), count, place)
    if place.launcher == "slurm" and count == 1:
        return torch.device("cuda", 0)  # srun --gpus-per-task 1 shows each process its own GPU alone
    if place.local_size > count:
        processes, devices = quantity(place.local_size, "process"), quantity(count, "GPU")
        raise InputError(f"{processes} were started on a machine with {devices}: start at most one per GPU")
    return torch.device("cuda", place.local_rank)


def _numbered(number: int, count: int, place: ProcessInfo) -> torch.device:
    """One of a machine's ``count`` GPUs. InputError when it has no such one, or several processes would share it."""
    name = f"cuda:{number}"
    if number >= count:
        raise InputError(
            Fault("device", f"must be below cuda:{count}: this machine has {quantity(count, 'GPU')}", name)
        )
    if place.size > 1:
        rule = f"must be cuda for {quantity(place.size, 'process')}, each of which gets a GPU of its own"
        raise InputError(Fault("device", rule, name))
    return torch.device("cuda", number)


def use_device(name: str | torch.device, place: ProcessInfo = SINGLE, allow_tf32: bool | None = None) -> torch.device:
    """``pick_device``, and the arithmetic of this process's CUDA kernels, the only place where it is set.

    - No TF32, in matrix products and in convolutions (torch's default: in convolutions), unless ``allow_tf32``; None =
      as in the last call that said it. fp32 is chosen for its digits: by ``precision`` fp32, and by the layers that
      stay in fp32 in half precision. TF32 has the 10-bit mantissa of fp16; half the memory as well has bf16.
    - cuDNN measures which algorithm is fastest for each shape it meets first. Training and sampling repeat a few shapes
      (one for each bucket of aspect ratios, and that of an incomplete batch) for many steps.
    """
    global _allow_tf32
    device = pick_device(name, place)
    if allow_tf32 is not None:
        _allow_tf32 = allow_tf32
    fast = _allow_tf32 and device.type == "cuda"  # elsewhere the same switch may mean other formats
    torch.set_float32_matmul_precision("high" if fast else "highest")
    torch.backends.cudnn.allow_tf32 = fast
    torch.backends.cudnn.benchmark = True
    return device


class _Undrawn(TorchFunctionMode):
    """Tensors on the meta device have no values, so they get no initial ones: for random ones, torch would import its
    compiler, which takes as long as importing torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.normal_ or getattr(func, "__module__", "") == "torch.nn.init":
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Networks that are built in the block are on the meta device: shapes and types, no values, no memory."""
    with torch.device("meta"), _Undrawn():
        yield


def with_memory(network: nn.Module, device: torch.device | str) -> nn.Module:
    """A network that was built ``without_values``, with memory that is to be filled.

    As ``to_empty``, whose ``empty_like`` of the meta device imports a computer algebra system, in a third of a second.
    """
    return network._apply(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device))


def reuse_freed_memory() -> bool:
    """Make glibc's malloc keep the memory of freed tensors of up to 32 MiB for the next ones.

    By default it returns large blocks to the kernel, which maps and zeroes the same pages again at the next allocation:
    a tenth to a fifth of a training step on a CPU. The peak of memory stays as it is; memory between peaks is kept.

    Returns whether the settings were made: not with another C library, nor where the environment has malloc's settings.
    """
    if any(name in os.environ for name in _OWN_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc: macOS, musl, Windows
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
