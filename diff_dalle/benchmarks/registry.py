"""All benchmarks by name. To add one: a file with a baseline, our version and a gate, and an entry here."""

from functools import partial
from importlib import import_module
from typing import Any

from .timing import Benchmark, Table


class _Module:
    """A module of this package, imported when one of its functions is called: --help needs none of them."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, function: str) -> Any:
        return partial(_call, self.name, function)


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module(f"{__package__}.{module}"), function)(*args, **kwargs)


cascade = _Module("cascade")
decoder_unet = _Module("decoder_unet")
gpu = _Module("gpu")
gradient_cache = _Module("gradient_cache")
guidance = _Module("guidance")
latent = _Module("latent")
loader = _Module("loader")
loading = _Module("loading")
lora_memory = _Module("lora_memory")
plan = _Module("plan")
sampling = _Module("sampling")
saving = _Module("saving")
scale = _Module("scale")
solvers = _Module("solvers")
start = _Module("start")
time_to_quality = _Module("time_to_quality")
train_step = _Module("train_step")
use_checkpoint = _Module("use_checkpoint")
watching = _Module("watching")

BENCHMARKS: dict[str, Benchmark | Table] = {
    "train_step": Benchmark(
        "training step of a 64-pixel U-Net, 64 channels, batch size 4, fp32: ours against Guided-Diffusion's",
        train_step.baseline,
        train_step.ours,
        train_step.gate,
        target=0.58,
        flops=train_step.flops,
        mfu_target=0.65,
    ),
    "train_step_auto": Benchmark(
        "the same step in the precision that --precision auto chooses on this CPU, against theirs in fp32",
        train_step.baseline,
        partial(train_step.ours, precision="auto"),
        train_step.auto_gate,
        target=0.58,
        flops=train_step.flops,
        precision="auto",
    ),
    "train_step_128": Benchmark(
        "the step of a U-Net of 128 channels, batch size 2, fp32",
        partial(train_step.baseline, 128, 2),
        partial(train_step.ours, 128, 2),
        partial(train_step.gate, 128),
        target=0.64,
        flops=partial(train_step.flops, 128, 2),
        mfu_target=0.72,
    ),
    "train_step_128_auto": Benchmark(
        "the same step in the precision that --precision auto chooses on this CPU, against theirs in fp32",
        partial(train_step.baseline, 128, 2),
        partial(train_step.ours, 128, 2, precision="auto"),
        partial(train_step.auto_gate, 128),
        target=0.64,
        flops=partial(train_step.flops, 128, 2),
        precision="auto",
    ),
    "train_step_memory": Benchmark(
        "the step of a U-Net of 64 channels, batch size 16, fp32",
        partial(train_step.baseline, batch_size=16),
        partial(train_step.ours, batch_size=16),
        train_step.gate,
        target=0.0,
        memory_target=0.65,
    ),
    "train_step_checkpoint_memory": Benchmark(
        "the same step of batch size 16, ours with use_checkpoint",
        partial(train_step.baseline, batch_size=16),
        partial(train_step.ours, batch_size=16, use_checkpoint=True),
        partial(train_step.gate, use_checkpoint=True),
        target=0.0,
        memory_target=0.50,
    ),
    "watching": Benchmark(
        "the same training step with flight recorder and lifeline against without",
        watching.unwatched,
        watching.watched,
        watching.gate,
        target=1.02,
        paired=True,
    ),
    "saving": Benchmark(
        "saving after that step: what training waits for against writing all files",
        saving.waiting,
        saving.in_background,
        saving.gate,
        target=0.15,
    ),
    "decoding": Benchmark(
        "decoding JPEGs of 256 to 512 pixels to 64: at reduced scale against Guided-Diffusion's method",
        loader.full_size,
        loader.reduced,
        loader.decoding_gate,
        target=1 / 1.4,
    ),
    "loader": Benchmark(
        "batches of the same JPEGs from shards against decoding alone, one process each",
        loader.reduced,
        loader.from_shards,
        loader.loader_gate,
        target=1.05,
        paired=True,
    ),
    "loading": Benchmark(
        "JPEGs of 256 to 767 pixels to a float batch, one process each: from shards against Guided-Diffusion's way",
        loading.from_files,
        loading.from_shards,
        loading.end_to_end_gate,
        target=1 / 1.9,
        paired=True,
    ),
    "loading_fastest": Benchmark(
        "the same with simplejpeg (extra jpeg) and --decode_scale 1",
        loading.from_files,
        loading.from_shards_fastest,
        loading.fastest_gate,
        target=1 / 3,
        paired=True,
        package="simplejpeg",
    ),
    "workers": Benchmark(
        "batches of the same JPEGs: two workers against one",
        loading.one_worker,
        loading.two_workers,
        loading.workers_gate,
        target=1 / 1.8,
    ),
    "worker_memory": Table("MiB of memory while one worker streams 50,000 samples", loading.memory_table),
    "buckets": Benchmark(
        "batches of the same JPEGs from shards, of several aspect ratios against squares, one process each",
        loader.in_batches,
        loader.in_buckets,
        loader.bucket_gate,
        target=1 / 0.9,
    ),
    "gradient_cache": Benchmark(
        "gradient of a contrastive loss over 256 samples: cached in micro-batches of 16 against one batch",
        gradient_cache.at_once,
        gradient_cache.in_micro_batches,
        gradient_cache.gate,
        target=1.6,
        memory_target=0.25,
    ),
    "guidance": Benchmark(
        "sampling step of a 64-pixel U-Net, batch size 4: guided by a noised CLIP of equal size against unguided",
        guidance.unguided,
        guidance.guided,
        guidance.gate,
        target=2.2,
    ),
    "sampling": Benchmark(
        "sampling four 64-pixel images from prompts, 64 channels, as sample.py does it: against a bare loop",
        sampling.bare,
        sampling.sampled,
        sampling.gate,
        target=1 / 0.95,
        paired=True,
    ),
    "sampling_guided": Benchmark(
        "the same with classifier-free guidance, both halves as one batch in the bare loop",
        sampling.bare_guided,
        sampling.sampled_guided,
        sampling.gate_guided,
        target=1 / 0.95,
        paired=True,
    ),
    "sampling_steps": Benchmark(
        "100 guided steps without the network, against one evaluation of it (2 % a step at most)",
        sampling.network_alone,
        sampling.steps_alone,
        sampling.gate_steps,
        target=2.0,
    ),
    "start": Table("seconds until a command shows something", start.start_table),
    "solvers": Table("errors of solvers and spacings on a mixture of Gaussians", solvers.tables),
    "scale": Table(
        "data of 1,024 processes simulated, steps of 1, 2 and 4 processes measured, steps on many GPUs computed",
        scale.tables,
    ),
    "plan": Table("memory and time that info.py plan predicts, beside five runs measured on the CPU", plan.tables),
    "lora_memory": Table(
        "memory of training the LoRA of the preset shapes_32_star, and shapes_32 whole", lora_memory.tables
    ),
    "gpu": Table("training steps and sampling on one GPU, in ten minutes", gpu.tables),
    "use_checkpoint": Benchmark(
        "training step of an upsampler to 256 pixels, batch size 4: with use_checkpoint against all activations kept",
        use_checkpoint.without_checkpoint,
        use_checkpoint.with_checkpoint,
        use_checkpoint.gate,
        target=1.4,
        memory_target=0.45,
    ),
    "cascade": Benchmark(
        "sampling an image with a cascade of three stages, one in memory at a time, against the largest stage alone",
        cascade.largest_alone,
        cascade.whole_cascade,
        cascade.gate,
        target=0.0,
        memory_target=1.15,
    ),
    "decoder_unet": Benchmark(
        "training step of the decoder's U-Net at a quarter of its width, 64 pixels: ours against plain torch modules",
        decoder_unet.plain,
        decoder_unet.ours,
        decoder_unet.gate,
        target=0.80,
        memory_target=0.75,
    ),
    "decoder_unet_checkpoint": Benchmark(
        "the same step: with checkpoint_during_training against without",
        decoder_unet.ours,
        decoder_unet.ours_checkpointed,
        decoder_unet.checkpoint_gate,
        target=1.4,
        memory_target=0.5,
    ),
    "latent_b": Benchmark(
        "training step of the tiny stage B, 64 pixels, batch size 16, fp32: ours against plain torch modules",
        latent.plain_b,
        latent.ours_b,
        latent.gate_b,
        target=0.90,
        memory_target=1.0,
    ),
    "latent_c": Benchmark(
        "training step of the tiny stage C, 64 pixels, batch size 16, fp32: ours against plain torch modules",
        latent.plain_c,
        latent.ours_c,
        latent.gate_c,
        target=0.90,
        memory_target=1.0,
    ),
    "time_to_quality": Table(
        "training until samples show what their captions say: the preset shapes_32 against diffusers' example",
        time_to_quality.tables,
        package="diffusers",
    ),
}
LONG = ("time_to_quality",)  # half an hour or so; left out unless asked for
