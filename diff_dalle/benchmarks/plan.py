"""What ``info.py plan`` predicts beside what is measured: peak memory and time of steps of five kinds of networks.

Real runs on a world of shapes, on the CPU with one thread, in fp32, each in a process of its own. Memory: the tensors
that exist before a step, and the allocator's events during it. Time: CPU seconds of the process, which do not depend on
what else the machine computes; ten steps of calibration and those that are predicted alternate.
"""

from __future__ import annotations

import gc
import io
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ..checkpoints.checkpoint import save_file
from ..commands.command_line import parse
from ..commands.plan.calibration import STEPS, WARM_UP, Steps
from ..commands.plan.memory import Layout, memory_of
from ..commands.plan.network import networks_of
from ..commands.sources import read_preset
from ..commands.training import TrainingRun
from ..commands.training_commands import TRAINING_COMMANDS
from ..config import shown
from ..data.tar import write_tar
from ..distributed.world import ALONE
from ..evaluation.report import markdown_table
from ..models.cost import storage_key
from ..shapes.scenes import ShapesConfig
from ..shapes.shards import sample_files
from .timing import in_fresh_process

SHARDS, SAMPLES, PIXELS, WIDTH = 8, 64, 64, 128  # samples of a shard; width of decoder_tiny's embeddings
ROUNDS, PREDICTED = 2, 30  # steps that are predicted, in as many pieces as the calibration
SEMANTIC = "cascade_semantic_tiny"
PRESETS: dict[str, Mapping[str, object]] = {
    "shapes_32": {"data.data_dir": "{world}", "preview.sample_interval": 0},
    "shapes_64_upsampler": {"data.data_dir": "{world}", "preview.sample_interval": 0},
    "shapes_32_classifier": {"data.data_dir": "{world}"},
    "decoder_tiny": {
        "data.webdataset_base_url": "{world}/{{}}.tar",
        "data.shard_width": 5,
        "train.n_sample_images": 0,
    },
    "cascade_stage_c_tiny": {
        "webdataset_path": "{world}",
        "effnet_checkpoint_path": "{folder}/semantic.pt",
        "loop.preview_samples": 0,
    },
}


@dataclass(frozen=True)
class Measured:
    """Bytes at the peak of a step, and CPU seconds of ``PREDICTED`` steps, each as planned and as measured."""

    planned_bytes: int
    bytes: int
    planned_seconds: float
    seconds: float


def write_world(folder: str) -> str:
    """Shards of shapes with random embeddings; their folder."""
    world, config = Path(folder) / "shards", ShapesConfig(image_size=PIXELS)
    world.mkdir()
    rng = np.random.default_rng(0)

    def sample(i: int) -> tuple[str, dict[str, bytes]]:
        file = io.BytesIO()
        np.save(file, rng.standard_normal(WIDTH).astype(np.float32))
        return f"{i:08d}", {**sample_files(config, i, "train"), "img_emb.npy": file.getvalue()}

    for shard in range(SHARDS):
        write_tar(str(world / f"{shard:05d}.tar"), map(sample, range(shard * SAMPLES, (shard + 1) * SAMPLES)))
    return str(world)


def run_of(preset: str, flags: Mapping[str, object], folder: str) -> TrainingRun:
    """A preset's run, with data and frozen networks of this folder."""
    kind = read_preset(preset).kind
    assert kind is not None
    given = {"data.num_workers": 0, **flags}
    given |= {"dtype": "float32"} if kind.startswith(("stage", "semantic")) else {}
    given |= {"train.amp": False} if kind == "decoder" else {}
    given |= {"training.precision": "fp32"} if kind in ("generator", "classifier") else {}
    argv = ["--preset", preset]
    for path, value in given.items():
        text = value.format(folder=folder, world=f"{folder}/shards") if isinstance(value, str) else shown(value)
        argv += ["--set", f"{path}={text}"]
    return parse(TRAINING_COMMANDS[kind].config_class, argv)


def write_semantic(folder: str) -> int:
    """A semantic encoder as it is before training, for stage C; the bytes of its weights."""
    run = run_of(SEMANTIC, {"webdataset_path": "{world}"}, folder)
    state = run.build_model(None).state_dict()
    save_file(f"{folder}/semantic.pt", "model", run.identity(None), 0, 0, state)
    return sum(tensor.nbytes for tensor in state.values())


def live_bytes() -> int:
    """Of all tensors that exist in this process."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and not each.is_meta]
    tensors = [each for each in tensors if each.layout == torch.strided]  # others have no storage of their own
    return sum({storage_key(each): each.untyped_storage().nbytes() for each in tensors}.values())


def peak_of_step(steps: Steps, others: int) -> int:
    """Bytes of all tensors at the peak of the next step, without ``others`` (live before the run was built)."""
    for trainee in steps.loop.trainees:
        trainee.task.zero_grad(set_to_none=True)  # as the step begins: what is freed in it must be allocated in it
    batch, before = next(steps.batches), live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps.loop.update(batch)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return before - others + max(0, int(np.cumsum(changes).max()))


def measured_run(preset: str, folder: str, frozen: int) -> Measured:
    """One of ``PRESETS``. frozen: bytes of its frozen networks."""
    torch.set_num_threads(1)
    others = live_bytes()
    run = run_of(preset, PRESETS[preset], folder)
    networks, training = networks_of(run, half=False), run.training
    layout = Layout(checkpoint=networks[0].probe.checkpointed)
    planned = memory_of(networks, layout, training.microbatch or training.batch_size, training.batch_size, frozen)
    steps = Steps.of(run, ALONE)
    steps.seconds(WARM_UP)
    peak = peak_of_step(steps, others)
    calibration: list[float] = []
    predicted: list[float] = []
    for _ in range(ROUNDS):
        calibration += steps.seconds(STEPS // ROUNDS)
        predicted += steps.seconds(PREDICTED // ROUNDS)
    return Measured(planned.total, peak, PREDICTED * statistics.median(calibration), sum(predicted))


def tables() -> Iterator[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_world(folder)
        semantic = in_fresh_process(write_semantic, folder)
        for preset in PRESETS:
            frozen = semantic if "semantic.pt" in str(PRESETS[preset].values()) else 0
            found = in_fresh_process(measured_run, preset, folder, frozen)
            rows.append(_row(preset, found))
    header = ["run", "MB planned", "measured", "error", f"s planned for {PREDICTED} steps", "measured", "error"]
    yield markdown_table(header, rows)


def _row(preset: str, found: Measured) -> list[str]:
    memory, seconds = found.planned_bytes / found.bytes - 1, found.planned_seconds / found.seconds - 1
    sizes = [f"{size / 1e6:,.1f}" for size in (found.planned_bytes, found.bytes)]
    times = [f"{each:.2f}" for each in (found.planned_seconds, found.seconds)]
    return [f"`{preset}`", *sizes, f"{memory:+.1%}", *times, f"{seconds:+.1%}"]
