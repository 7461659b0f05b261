"""Training and sampling on one GPU: images per second, share of its peak, and memory.

The rows come in order of interest, each as soon as it is measured; none begins after ``MINUTES``, and none that
compiles after ``COMPILING`` of them. A row that does not fit into memory is repeated with half the batch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.diffusion.augmentation import Degradation, area_downsample
from diff_dalle.diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.diffusion.resample import DenoisingConfig
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.images.signal import PixelSignal
from diff_dalle.models.compiling import compile_training
from diff_dalle.models.generator import Generator, GeneratorConfig
from diff_dalle.models.layers import to_channels_last
from diff_dalle.models.precision import DTYPES, autocast, for_inference
from diff_dalle.models.super_resolution import LowResConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.unet import UNetConfig
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.tasks.upsampling import UpsamplingTask
from diff_dalle.training.optim_config import OptimConfig
from diff_dalle.training.settings import TrainingConfig
from diff_dalle.training.trainee import Trainee

from .baseline_unet import BaselineUNet
from .regression import loop_of
from .train_step import EMA_RATE, LR, config_of, published_step

MINUTES = 9.0
COMPILING = 0.6
COLUMNS = ("work", "form", "precision", "batch", "images/s", "MFU", "peak GiB")
NO_TEXT = TextEncoderConfig(enc_attn_dim=0)


@dataclass(frozen=True)
class Workload:
    """What is measured, and where.

    generator, upsampler: their U-Nets; trained without text and dropout, as the published form has neither.
    factor:               of the upsampler.
    text:                 of the generator that is sampled from.
    batches:              images per step of generator, upsampler and sampling, if they fit.
    steps:                of sampling.
    repeats, warm_up:     steps or samplings that are timed, and that precede them.
    matrix:               rows and columns of the product that stands for the peak.
    backend:              torch.compile's.
    """

    device: torch.device
    generator: UNetConfig = config_of(192)
    upsampler: UNetConfig = UNetConfig(
        image_size=256,
        num_channels=192,
        num_res_blocks=2,
        channel_mult=(1, 1, 2, 2, 4, 4),
        attention_resolutions=(32, 16, 8),
        num_head_channels=64,
        resblock_updown=True,
    )
    factor: int = 4
    text: TextEncoderConfig = TextEncoderConfig(enc_attn_dim=512, enc_depth=6, enc_heads=8)
    batches: tuple[int, int, int] = (64, 8, 32)
    steps: int = 20
    repeats: int = 8
    warm_up: int = 3
    matrix: int = 8192
    backend: str = "inductor"


# ------------------------------------------------------------------------------------------------------------ networks


def network(config: UNetConfig, factor: int = 0, text: TextEncoderConfig = NO_TEXT) -> Generator:
    """A generator, or with a ``factor`` an upsampler."""
    low_res = LowResConfig(config.image_size // factor) if factor else LowResConfig()
    return to_channels_last(Generator(GeneratorConfig(config, text, low_res), 50))


@cache
def flops_per_image(config: UNetConfig, factor: int = 0) -> int:
    """FLOPs of forward and backward pass, nothing computed twice; a multiply-add counts as two."""
    with torch.device("meta"):
        model, x, t = network(config, factor), torch.empty(1, 3, config.image_size, config.image_size), torch.empty(1)
        cond = Conditioning()
        if factor:
            cond = Conditioning(low_res=area_downsample(x, factor), low_res_level=t, low_res_blur=t)
        with FlopCounterMode(display=False) as counter:
            model(x, t, cond=cond).sum().backward()
    return counter.get_total_flops()


# ---------------------------------------------------------------------------------------- work: a step, and its images


def ours(
    work: Workload, config: UNetConfig, factor: int, precision: str, compiled: bool, batch_size: int
) -> Callable[[], object]:
    """The loop's own update."""
    process, world = create_gaussian_diffusion(DiffusionConfig()), World(SINGLE, work.device)
    model, settings = network(config, factor), DenoisingConfig(caption_dropout=0.0)
    if factor:
        task: DenoisingTask = UpsamplingTask(model, process, settings, factor, Degradation(max_level=0.5))
    else:
        task = DenoisingTask(model, process, settings)
    trainee = Trainee(task, OptimConfig(lr=LR, ema_rate=(EMA_RATE,)), precision, world)
    if compiled:
        compile_training(task, work.backend)
    loop = loop_of(trainee, TrainingConfig(batch_size=batch_size), world)
    batch = Batch(_images(work, config, batch_size), Conditioning(), torch.arange(batch_size))
    return lambda: loop.update(batch)


def published(work: Workload, config: UNetConfig, factor: int, precision: str, batch_size: int) -> Callable[[], object]:
    """Guided-Diffusion's network and step."""
    model = BaselineUNet(config, in_channels=6 if factor else 3).to(work.device)
    process = create_gaussian_diffusion(DiffusionConfig())
    images = _images(work, config, batch_size)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        if factor:
            low_res = area_downsample(images, factor)
            x = torch.cat([x, F.interpolate(low_res, x.shape[2:], mode="bilinear")], dim=1)
        return model(x, t)

    def loss() -> Tensor:
        t = torch.randint(process.num_timesteps, (batch_size,)).to(work.device)
        with autocast(precision, work.device):
            return process.training_losses(denoise, images, t)["loss"].mean()

    return published_step(model, loss)


def sampling(work: Workload, precision: str, half: bool, compiled: bool, batch_size: int) -> Callable[[], object]:
    """Images with classifier-free guidance. half: weights converted once, instead of at every use."""
    model = network(work.generator, text=work.text).to(work.device).eval().requires_grad_(False)
    if half:
        for_inference(model, precision)
    if compiled:
        model.forward = torch.compile(model.forward, backend=work.backend, fullgraph=True)  # type: ignore[method-assign]
    tokens = torch.ones(batch_size, work.text.text_length, dtype=torch.long)
    cond, size = Conditioning(tokens=tokens, mask=tokens > 0), work.generator.image_size
    null = cond.drop(torch.ones(batch_size, dtype=torch.bool))
    batch = SampleBatch(PixelSignal(), (size, size), range(batch_size), cond, null)
    sampler = SamplerConfig("dpm++2m", work.steps)
    process = sampler.process(DiffusionConfig())

    def sample() -> Tensor:
        with autocast(precision, work.device):
            return sample_batch(model, process, batch, sampler, GuidanceConfig(guidance_scale=3.0))

    return sample


def _images(work: Workload, config: UNetConfig, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, config.image_size, config.image_size, generator=generator).to(work.device) * 2 - 1


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Row:
    """A line of the table. build: batch size → the work; images: per repetition and image of the batch, that count;
    flops: per image; None = no MFU."""

    work: str
    form: str
    precision: str
    batch: int
    build: Callable[[int], Callable[[], object]]
    images: int = 1
    flops: int | None = None


def rows(work: Workload) -> Iterator[Row]:
    """All lines, the most interesting first: what compiles comes last, half precision before the others."""
    for compiled, precisions in ((False, ("bf16",)), (True, ("bf16",)), (False, ("fp16", "fp32"))):
        for precision in precisions:
            yield from _training_rows(work, precision, compiled)
        for precision in precisions:
            yield from _sampling_rows(work, precision, compiled)


def _training_rows(work: Workload, precision: str, compiled: bool) -> Iterator[Row]:
    generator, upsampler, _ = work.batches
    dropout = replace(work.generator, dropout=0.1)
    for name, config, factor, batch in (
        ("generator", work.generator, 0, generator),
        ("upsampler", work.upsampler, work.factor, upsampler),
        ("generator", work.generator, 0, max(1, generator // 8)),
        ("generator, dropout .1", dropout, 0, generator),
    ):
        title, flops = f"training step, {name}, {config.image_size} px", flops_per_image(config, factor)
        build: Callable = partial(ours, work, config, factor, precision, compiled)
        yield Row(title, _form(compiled), precision, batch, build, flops=flops)
        if precision != "fp16" and not compiled and not config.dropout:  # theirs scales no loss under autocast
            build = partial(published, work, config, factor, precision)
            yield Row(title, "published form", precision, batch, build, flops=flops)


def _sampling_rows(work: Workload, precision: str, compiled: bool) -> Iterator[Row]:
    steps = work.steps
    title = f"sampling, {work.generator.image_size} px, images × {steps} guided steps"
    for half in (False, True) if precision in DTYPES else (False,):
        form = _form(compiled) + (", half weights" if half else "")
        build = partial(sampling, work, precision, half, compiled)
        yield Row(title, form, precision, work.batches[2], build, images=steps)


def _form(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def tables(work: Workload | None = None, minutes: float = MINUTES) -> Iterator[str]:
    """The table, line by line. work: None = the full one on the first CUDA device."""
    if work is None:
        if not torch.cuda.is_available():
            yield "skipped: torch finds no CUDA device on this machine, and all figures here are of one"
            return
        work = Workload(torch.device("cuda", 0))
    cuda, start = work.device.type == "cuda", time.monotonic()
    rates = {precision: matmul_rate(work, precision) for precision in ("fp32", *DTYPES)}
    name = torch.cuda.get_device_name(work.device) if cuda else str(work.device)
    peaks = ", ".join(f"{rate / 1e12:,.3g} in {precision}" for precision, rate in rates.items())
    yield f"{name}, torch {torch.__version__}. MFU is of a large product of matrices: TFLOP/s {peaks}."
    header, rule = markdown_table(COLUMNS, []).splitlines()[:2]
    yield f"{header}\n{rule}"
    for row in rows(work):
        allowed = 60 * minutes * (COMPILING if row.form.startswith("compiled") else 1)
        if time.monotonic() - start < allowed:
            cells = measured_cells(work, row, rates[row.precision])
        else:
            cells = ["", "time is up", "", ""]
        yield markdown_table(COLUMNS, [[row.work, row.form, row.precision, *cells]]).splitlines()[2]


def measured_cells(work: Workload, row: Row, rate: float) -> list[str]:
    """The cells batch, images/s, MFU and peak GiB; instead of images/s, why there are none."""
    batch = row.batch
    while True:
        try:
            seconds, peak = _run(work, row.build, batch)
        except torch.OutOfMemoryError:
            failure = "out of memory"
        except Exception as error:  # of a compiler, or of a kernel that the device lacks: the other rows count too
            return [str(batch), f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:80]}", "", ""]
        else:
            mfu = "" if row.flops is None else f"{row.flops * batch / seconds / rate:.0%}"
            return [str(batch), f"{row.images * batch / seconds:,.1f}", mfu, peak]
        finally:
            _free(work)
        if batch == 1:
            return ["1", failure, "", ""]
        batch //= 2


def _run(work: Workload, build: Callable[[int], Callable[[], object]], batch: int) -> tuple[float, str]:
    """Seconds of a repetition, and the peak memory in GiB."""
    cuda, step = work.device.type == "cuda", build(batch)
    for _ in range(work.warm_up):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats(work.device)
    seconds = _seconds(work, step, work.repeats)
    return seconds, f"{torch.cuda.max_memory_allocated(work.device) / 2**30:.1f}" if cuda else ""


def _seconds(work: Workload, step: Callable[[], object], repeats: int) -> float:
    """Mean of one repetition. The device works on after a call, so that it is waited for."""
    _wait(work)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(work)
    return (time.perf_counter() - start) / repeats


def _wait(work: Workload) -> None:
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)


def _free(work: Workload) -> None:
    """Forget what a row has left: compiled graphs, reference cycles, cached memory."""
    torch.compiler.reset()
    gc.collect()
    if work.device.type == "cuda":
        torch.cuda.empty_cache()


def matmul_rate(work: Workload, precision: str) -> float:
    """FLOPs per second of a product of two matrices, after some to warm up."""
    a = torch.ones(work.matrix, work.matrix, dtype=DTYPES.get(precision, torch.float32), device=work.device)
    for _ in range(work.warm_up):
        a @ a
    return 2 * work.matrix**3 / _seconds(work, lambda: a @ a, work.repeats)
