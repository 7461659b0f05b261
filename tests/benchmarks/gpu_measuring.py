"""Measuring a step: its rate, its memory, and the device's own rate in products of matrices."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch

from diff_dalle.distributed.devices import use_device
from diff_dalle.models.precision import DTYPES

from .gpu_steps import PRECISION, Build, Step

REPEATS, WARM_UP = 8, 3  # steps that are timed, and that precede them


@dataclass(frozen=True)
class Measured:
    """batch: images per step, as many as fit; rate: steps times images per second; peak: GiB of memory, None = not on a
    GPU; first: seconds of the first step, in which it compiles."""

    batch: int
    rate: float
    peak: float | None
    first: float


def measured(device: torch.device, build: Build, batch: int) -> Measured:
    """A step with ``batch`` images or, where they do not fit into memory, half of them, a quarter, …"""
    use_device(device)
    while True:
        try:
            return _measured(device, build, batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        finally:
            free(device)
        batch //= 2


def _measured(device: torch.device, build: Build, batch: int) -> Measured:
    step = build(device, batch)
    first = _seconds(device, step, 1)
    _seconds(device, step, WARM_UP)
    if device.type != "cuda":
        return Measured(batch, batch / _seconds(device, step, REPEATS), None, first)
    torch.cuda.reset_peak_memory_stats(device)
    seconds = _seconds(device, step, REPEATS)
    return Measured(batch, batch / seconds, torch.cuda.max_memory_allocated(device) / 2**30, first)


def _seconds(device: torch.device, step: Step, repeats: int) -> float:
    """Mean of one repetition. The device works on after a call, so that it is waited for."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Forget what a step has left: compiled graphs, reference cycles, cached memory."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def name_and_peak(device: torch.device, size: int) -> tuple[str, float]:
    """What the device is called, and its FLOPs per second in a half-precision product of two matrices [size, size].

    They are random: of equal values a GPU needs less power, so that it computes faster than it ever does in training.
    """
    a, b = torch.randn(2, size, size, device=device, dtype=DTYPES[PRECISION])
    for _ in range(WARM_UP):
        a @ b
    seconds = _seconds(device, lambda: a @ b, REPEATS)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device), 2 * size**3 / seconds
