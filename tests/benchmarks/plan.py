"""What ``info.py plan`` predicts beside what is measured: peak memory and speed of five kinds of networks.

Real runs on a world of shapes, on the CPU in fp32, each in a process of its own. Memory: the tensors that exist before
a step, and the allocator's events during it, on one thread. Speed: the plan of ``--calibrate``, and the images a second
that a training run with the same settings logs, on one thread and on two; both take turns. It is that of the clock, so
that the machine must be idle.
"""

from __future__ import annotations

import gc
import io
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.checkpoints.kinds import TRAINING_COMMANDS
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.info import parse_plan
from diff_dalle.commands.sources import read_preset
from diff_dalle.config import shown
from diff_dalle.data.tar import write_tar
from diff_dalle.distributed.launch import launch
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.models.cost import storage_key
from diff_dalle.recipes.planning.calibration import WARM_UP, Steps
from diff_dalle.recipes.planning.cluster import PlanConfig
from diff_dalle.recipes.planning.cost import networks_of
from diff_dalle.recipes.planning.plan import Plan
from diff_dalle.recipes.planning.step import Layout, Step
from diff_dalle.recipes.recipe import Recipe
from diff_dalle.recipes.train import train_recipe
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import ShapesWorld

from .timing import in_fresh_process

SHARDS, SAMPLES, PIXELS, WIDTH = 8, 64, 64, 128  # samples of a shard; width of decoder_tiny's embeddings
THREADS, ROUNDS = (1, 2), 2  # of each round the plan and the run
LOGGED, LINES = 10, 4  # steps between log lines, and lines, of which the first is that of the start
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
    """What was planned, and what was measured."""

    planned: float
    found: float

    @property
    def error(self) -> str:
        return f"{self.planned / self.found - 1:+.1%}"


def length(kind: str, steps: int, batch: int, folder: str) -> dict[str, object]:
    """The settings of a run that takes so many steps, of ``batch`` images each, and has its log in a folder."""
    if kind == "decoder":
        flags: dict[str, object] = {
            "train.epochs": 1,
            "train.epoch_samples": steps * batch,
            "tracker.data_path": folder,
        }
        saved = {"train.validation_samples": batch, "tracker.save.0.save_latest_to": f"{folder}/saved.pth"}
        return {**flags, **saved, "train.log_interval": LOGGED}
    if kind in ("generator", "classifier"):
        return {"training.iterations": steps, "training.logdir": folder, "training.log_interval": LOGGED}
    flags = {"updates": steps, "warmup_updates": 1, "loop.log_interval": LOGGED}
    return {**flags, "checkpoint_path": folder, "output_path": folder}


def write_world(folder: str) -> str:
    """Shards of shapes with random embeddings; their folder."""
    world, config = Path(folder) / "shards", ShapesConfig(image_size=PIXELS)
    world.mkdir()
    rng = np.random.default_rng(0)

    def sample(i: int) -> tuple[str, dict[str, bytes]]:
        file = io.BytesIO()
        np.save(file, rng.standard_normal(WIDTH).astype(np.float32))
        key, files = ShapesWorld(config).files("train", i)
        return key, {**files, "img_emb.npy": file.getvalue()}

    for shard in range(SHARDS):
        write_tar(str(world / f"{shard:05d}.tar"), map(sample, range(shard * SAMPLES, (shard + 1) * SAMPLES)))
    return str(world)


def flags_of(preset: str, flags: Mapping[str, object], folder: str) -> list[str]:
    """The command line of a preset's run, with data and frozen networks of this folder."""
    kind = kind_of(preset)
    given = {"data.num_workers": 0, **flags}
    given |= {"dtype": "float32"} if kind.startswith(("stage", "semantic")) else {}
    given |= {"train.amp": False} if kind == "decoder" else {}
    given |= {"training.precision": "fp32"} if kind in ("generator", "classifier") else {}
    argv = ["--preset", preset]
    for path, value in given.items():
        text = value.format(folder=folder, world=f"{folder}/shards") if isinstance(value, str) else shown(value)
        argv += ["--set", f"{path}={text}"]
    return argv


def run_of(preset: str, flags: Mapping[str, object], folder: str) -> Recipe:
    """See ``flags_of``."""
    return parse(TRAINING_COMMANDS[kind_of(preset)].config_class, flags_of(preset, flags, folder)).recipe()


def kind_of(preset: str) -> str:
    kind = read_preset(preset).kind
    assert kind is not None
    return kind


def write_semantic(folder: str) -> int:
    """A semantic encoder as it is before training, for stage C; the bytes of its weights."""
    session = run_of(SEMANTIC, {"webdataset_path": "{world}"}, folder).open(ALONE)
    state = session.network().state_dict()
    save_file(f"{folder}/semantic.pt", "model", session.identity(), 0, 0, state)
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


def measured_memory(preset: str, folder: str, frozen: int) -> Measured:
    """Bytes at the peak of a step of one of ``PRESETS``. frozen: bytes of its frozen networks."""
    torch.set_num_threads(1)
    others = live_bytes()
    recipe = run_of(preset, PRESETS[preset], folder)
    step = Step.of(recipe, PlanConfig(gpus=1, frozen_memory=frozen / 2**30), networks_of(recipe))
    planned = step.memory(Layout(checkpoint=step.networks[0].probe.checkpointed), recipe.microbatch)
    steps = Steps.of(recipe, ALONE)
    steps.seconds(WARM_UP)
    return Measured(planned.total, peak_of_step(steps, others))


def settings_for(preset: str, threads: int) -> dict[str, object]:
    """Of a plan and of the run that it is for. The data has a worker, as the plan assumes."""
    device = {"train.device": "cpu"} if kind_of(preset) == "decoder" else {"distributed.device": "cpu"}
    return {**PRESETS[preset], **device, "data.num_workers": 1, "distributed.threads": threads}


def planned_speed(preset: str, folder: str, threads: int) -> float:
    """Images a second, as ``info.py plan --calibrate`` says. It must plan the run's own settings."""
    run = parse_plan([*flags_of(preset, settings_for(preset, threads), folder), "--gpus", "1", "--calibrate", "True"])
    plan = Plan.of(run)
    found = plan.best.layout.checkpoint, plan.best.microbatch
    assert found == (plan.step.networks[0].probe.checkpointed, plan.recipe.microbatch), found
    return plan.images_per_second


def trained_speed(preset: str, folder: str, threads: int) -> float:
    """Images a second that a training run logs after its start."""
    settings = settings_for(preset, threads)
    batch = run_of(preset, settings, folder).training.batch_size
    with tempfile.TemporaryDirectory() as logs:
        steps = LINES * LOGGED
        recipe = run_of(preset, {**settings, **length(kind_of(preset), steps, batch, logs)}, folder)
        with launch(recipe.distributed) as world:
            train_recipe(recipe, world)
        return logged_speed(f"{recipe.training.logdir}/progress.jsonl")


def logged_speed(path: str) -> float:
    """Images a second over all steps of a log but those before its first line."""
    lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    lines = [line for line in lines if "samples_per_second" in line]
    counts = np.diff([line["samples"] for line in lines])
    return float(counts.sum() / (counts / [line["samples_per_second"] for line in lines[1:]]).sum())


def measured_speed(preset: str, folder: str, threads: int) -> Measured:
    """Medians of rounds in which both take turns, in a fresh process each."""
    pairs = [
        [in_fresh_process(each, preset, folder, threads) for each in (planned_speed, trained_speed)]
        for _ in range(ROUNDS)
    ]
    return Measured(*map(statistics.median, zip(*pairs, strict=True)))


def tables() -> Iterator[str]:
    sizes, speeds = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_world(folder)
        semantic = in_fresh_process(write_semantic, folder)
        for preset in PRESETS:
            frozen = semantic if "semantic.pt" in str(PRESETS[preset].values()) else 0
            found = in_fresh_process(measured_memory, preset, folder, frozen)
            sizes.append([f"`{preset}`", f"{found.planned / 1e6:,.1f}", f"{found.found / 1e6:,.1f}", found.error])
        yield markdown_table(["run", "MB planned", "measured", "error"], sizes)
        for preset in PRESETS:
            for threads in THREADS:
                found = measured_speed(preset, folder, threads)
                speeds.append([f"`{preset}`", threads, f"{found.planned:.1f}", f"{found.found:.1f}", found.error])
        yield markdown_table(["run", "threads", "images/s planned", "measured", "error"], speeds)
