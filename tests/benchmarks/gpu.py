"""Training and sampling on one GPU: images per second, share of its peak, memory, the ratio to the published form.

The rows come in order of interest, each as soon as it is measured. No row begins after the budget, and none that
compiles after ``COMPILING`` of it; none takes more than ``ROW`` of it. Rows are computed in a process of their own, so
that one that fails, hangs or leaves the device unusable says so and is followed by the next. What does not fit into
memory is repeated with half the batch.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from diff_dalle.distributed.devices import use_device
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.models.precision import DTYPES

from . import gpu_subjects as full
from .apart import Apart
from .gpu_steps import PRECISION, Build, Step, diffusers_unet, ours, published, sampling, transformer, with_plain_norms
from .gpu_subjects import Classifier, Latents, Pixels, Subject, flops_per_image

REPEATS, WARM_UP = 8, 3  # steps that are timed, and that precede them
COMPILING, ROW = 0.6, 0.3  # of the budget
COLUMNS = ("work", "form", "batch", "images/s", "MFU", "peak GiB", "first step s", "× published")
PUBLISHED = "published form"
COMPILED = "compiled"  # in the names of forms that do


@dataclass(frozen=True)
class Workload:
    """What is measured, and where; see gpu_subjects.py.

    steps:   of sampling.
    matrix:  rows and columns of the product that stands for the peak.
    backend: torch.compile's.
    """

    device: torch.device
    generator: Pixels = full.GENERATOR
    upsampler: Pixels = full.UPSAMPLER
    stage_c: Latents = full.STAGE_C
    stage_b: Latents = full.STAGE_B
    classifier: Classifier = full.CLASSIFIER
    largest: Latents = full.STAGE_C_LARGE
    sampled: Pixels = full.SAMPLED
    steps: int = 20
    matrix: int = 8192
    backend: str = "inductor"


@dataclass(frozen=True)
class Measured:
    """batch: images per step, as many as fit; rate: steps times images per second; peak: GiB of memory, None = not on a
    GPU; first: seconds of the first step, in which it compiles."""

    batch: int
    rate: float
    peak: float | None
    first: float


@dataclass(frozen=True)
class Row:
    """A line of the table.

    steps:   what its images are counted times.
    subject: whose FLOPs count, none of them twice; None = no MFU.
    """

    work: str
    form: str
    batch: int
    build: Build
    steps: int = 1
    subject: Subject | None = None

    def cells(self, found: Measured, flops: int | None, peak: float, reference: Measured | None) -> list[str]:
        """flops: of an image; peak: the device's per second; reference: the published form."""
        return [
            str(found.batch),
            f"{self.steps * found.rate:,.1f}",
            "" if flops is None else f"{flops * found.rate / peak:.0%}",
            "" if found.peak is None else f"{found.peak:.1f}",
            f"{found.first:.1f}",
            "" if reference is None else f"{found.rate / reference.rate:.2f}",
        ]


# ------------------------------------------------------------------------------------------- the rows, and their order


def rows(work: Workload) -> Iterator[Row]:
    """All lines: eager training of everything, beside what others have; variants of the generator; everything compiled;
    sampling; what saves memory."""
    g, compiled, small = work.generator, {"backend": work.backend}, max(1, work.generator.batch_size // 8)
    subjects: tuple[Pixels | Latents | Classifier, ...] = g, work.upsampler, work.stage_c, work.stage_b, work.classifier
    for subject in subjects:
        if not isinstance(subject, Classifier):
            yield _training(subject, PUBLISHED, partial(published, subject))
        yield _ours(subject, "eager", {})
        if subject is g:
            yield _training(g, "diffusers' U-Net", partial(diffusers_unet, g))
            yield _training(g, "torch's transformer", partial(transformer, g))
    yield _training(g, "eager, plain norms", with_plain_norms(partial(ours, g)))
    yield _ours(g, COMPILED, compiled)
    yield _ours(g, "eager, Muon", {"optimizer": "muon"})
    yield _ours(g, "eager, dropout 0.1", {"dropout": 0.1})
    yield _training(g, PUBLISHED, partial(published, g), small)
    yield _ours(g, "eager", {}, small)
    yield _ours(g, COMPILED, compiled, small)
    for subject in subjects[1:]:
        yield _ours(subject, COMPILED, compiled)
    yield _ours(g, f"{COMPILED}, Muon", {"optimizer": "muon", **compiled})
    yield _ours(g, f"{COMPILED}, dropout 0.1", {"dropout": 0.1, **compiled})
    yield _ours(g, "eager, fp16", {"precision": "fp16"})
    yield _sampling(work, "eager", {})
    yield _sampling(work, f"{COMPILED}, CUDA graph", {"graph": True, **compiled})
    yield _sampling(work, COMPILED, compiled)
    for subject in (g, work.upsampler, work.largest):
        yield _ours(subject, "eager, use_checkpoint", {"use_checkpoint": True})


def _training(subject: Subject, form: str, build: Build, batch: int = 0) -> Row:
    return Row(f"training, {subject.name}", form, batch or subject.batch_size, build, subject=subject)


def _ours(subject: Subject, form: str, options: Mapping[str, Any], batch: int = 0) -> Row:
    return _training(subject, form, partial(ours, subject, **options), batch)


def _sampling(work: Workload, form: str, options: Mapping[str, Any]) -> Row:
    title = f"sampling, {work.sampled.name}, images × {work.steps} guided steps"
    build = partial(sampling, work.sampled, work.steps, **options)
    return Row(title, form, work.sampled.batch_size, build, work.steps)


# ----------------------------------------------------------------------------------------------------------- the table


def tables(
    seconds: float,
    work: Workload | None = None,
    call: Callable | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[str]:
    """The table, line by line.

    seconds: the budget.
    work:    None = the full one on the first CUDA device.
    call:    computes rows, with the arguments and errors of ``Apart.call``.
    """
    if work is None:
        if not torch.cuda.is_available():
            yield "skipped: torch finds no CUDA device on this machine, and all figures here are of one"
            return
        work = Workload(torch.device("cuda", 0))
    start, apart = clock(), Apart()
    call, failures = call or apart.call, (RuntimeError, TimeoutError, ChildProcessError)
    try:
        name, peak = call(seconds, name_and_peak, work.device, work.matrix)
    except failures as error:
        name, peak = f"{work.device} ({error})", math.nan
    yield f"{name}, torch {torch.__version__}; MFU is of a large bf16 product, {peak / 1e12:,.3g} TFLOP/s"
    yield "\n".join(markdown_table(COLUMNS, []).splitlines()[:2])
    references: dict[tuple[str, int], Measured] = {}
    for number, row in enumerate(rows(work)):
        left, cells = start + seconds - clock(), [str(row.batch), "time is up", "", "", "", ""]
        if left > seconds * (1 - COMPILING if row.form.startswith(COMPILED) else 0):
            try:
                found, flops = call(min(left, ROW * seconds), measured_row, work, number)
            except failures as error:
                cells[1] = str(error)[:80]
            else:
                if row.form == PUBLISHED:
                    references[row.work, row.batch] = found
                cells = row.cells(found, flops, peak, references.get((row.work, row.batch)))
        yield markdown_table(COLUMNS, [[row.work, row.form, *cells]]).splitlines()[2]
    apart.close()


def measured_row(work: Workload, number: int) -> tuple[Measured, int | None]:
    """What is measured of a row, by its place, and the FLOPs of an image."""
    row = list(rows(work))[number]
    return measured(work.device, row.build, row.batch), None if row.subject is None else flops_per_image(row.subject)


# ------------------------------------------------------------------------------------------------------- measuring


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
