"""How the C library hands out the memory of tensors on the CPU."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt(3)
_LARGEST_KEPT = 32 << 20  # bytes; glibc accepts no more
_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


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
