"""What training a LoRA takes beside training its base whole: the preset shapes_32_star over shapes_32.

Steps on the CPU in fp32, of equal batches, each kind in a process of its own, after steps that allocate what stays.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from checkpoint_making import save_model
from tiny_settings import flags
from torch import Tensor

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.training_kinds import parse_lora
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.models.adapters.lora import Adapted
from diff_dalle.models.cost import storage_key
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.planning.calibration import WARM_UP, Steps
from diff_dalle.recipes.recipe import Recipe
from diff_dalle.training.trainee import Trainee
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes

from .plan import live_bytes, peak_of_step
from .timing import in_fresh_process, resident_bytes

BASE, LORA, BATCH_SIZE = "shapes_32", "shapes_32_star", 16  # presets; the batch of the latter


@dataclass(frozen=True)
class Memory:
    """Bytes.

    held:    of weights, those of a frozen base too, gradients, states of the optimizer, and averages.
    tensors: of all tensors at the peak of a step.
    process: of the process at its peak. before: at that before the first step.
    """

    held: int
    tensors: int
    process: int
    before: int


def write_files(folder: str) -> None:
    """The data, and the base as it is before training: ``shapes/train`` and ``base.pt``."""
    config = ShapesConfig(image_size=32, train_samples=64, val_samples=0, samples_per_shard=8)
    write_shapes(config, f"{folder}/shapes")
    save_model(full(folder).settings, f"{folder}/base.pt", fresh=1.0, spread=0.0)


def full(folder: str, batch_size: int = BATCH_SIZE) -> Recipe:
    """The training of the base."""
    return parse(GeneratorRun, ["--preset", BASE, *_flags(folder, batch_size), "--sample_interval", "0"]).recipe()


def adapted(folder: str, batch_size: int = BATCH_SIZE) -> Recipe:
    """The training of its LoRA."""
    run = parse_lora(["--preset", LORA, "--model_path", f"{folder}/base.pt", *_flags(folder, batch_size)])
    return run.recipe()


def _flags(folder: str, batch_size: int) -> list[str]:
    given = {"data_dir": f"{folder}/shapes/train", "batch_size": batch_size, "num_workers": 0, "precision": "fp32"}
    return flags(given)


def held_bytes(trainee: Trainee) -> int:
    """See ``Memory``. After a step, which makes gradients and states."""
    model = trainee.task.model
    networks = [trainee.task, model.base] if isinstance(model, Adapted) else [trainee.task]
    parameters = [each for network in networks for each in network.parameters()]
    kept: list[Tensor | None] = [*parameters, *(each.grad for each in parameters)]
    for optimization in trainee.optimizations.values():
        for entry in optimization.optimizer.state.values():
            kept += [value for value in entry.values() if isinstance(value, Tensor)]
    for ema in trainee.emas:
        kept += ema.averages.values()
    found = {storage_key(each): each.untyped_storage().nbytes() for each in kept if each is not None}
    return sum(found.values())


def memory_of_run(build: Callable[..., Recipe], folder: str, batch_size: int = BATCH_SIZE) -> Memory:
    torch.set_num_threads(1)
    others = live_bytes()
    steps = Steps.of(build(folder, batch_size), ALONE)
    before = resident_bytes()
    steps.seconds(WARM_UP)
    (trainee,) = steps.loop.trainees
    held, process = held_bytes(trainee), resident_bytes()  # before the profiler, which takes memory too
    return Memory(held, peak_of_step(steps, others), process, before)


def file_sizes(folder: str) -> tuple[int, int]:
    """Of the LoRA file and of the base's, in bytes."""
    recipe = adapted(folder)
    (trainee,) = Steps.of(recipe, ALONE).loop.trainees
    role, state = trainee.evaluated()
    (write,) = recipe.open(ALONE).exports(trainee, {role: {"state": state}}).values()
    file = io.BytesIO()
    write(file)
    return len(file.getvalue()), os.path.getsize(f"{folder}/base.pt")


def tables() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        in_fresh_process(write_files, folder)
        lora, whole = (in_fresh_process(memory_of_run, build, folder) for build in (adapted, full))
        sizes = in_fresh_process(file_sizes, folder)
    rows = {
        "weights, gradients, optimizer, averages": (lora.held, whole.held),
        "all tensors at the peak of a step": (lora.tensors, whole.tensors),
        "the process at its peak": (lora.process, whole.process),
        "the process before the first step": (lora.before, whole.before),
        "the file": sizes,
    }
    yield markdown_table(
        [f"MB, batch size {BATCH_SIZE}", "LoRA", "full training", "ratio"],
        [[name, f"{own / 1e6:,.1f}", f"{all_ / 1e6:,.1f}", f"{own / all_:.3f}"] for name, (own, all_) in rows.items()],
    )
