"""Ten steps of a run on this machine, for the speed of all others."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...batch import Batch
from ...checkpoints.checkpoint import Identity
from ...checkpoints.run_folder import RunFolder
from ...distributed.cores import threads_said, usable_cores
from ...distributed.devices import reuse_freed_memory, use_device
from ...distributed.world import SINGLE, World
from ...training.loop import TrainLoop
from ..recipe import Recipe
from .cluster import PlanConfig
from .cost import networks_of
from .step import Step

STEPS, WARM_UP = 10, 2


@dataclass
class Steps:
    """A run of which single steps can be taken, in one process, without files of its own."""

    loop: TrainLoop
    batches: Iterator[Batch]

    @staticmethod
    def of(recipe: Recipe, world: World) -> Steps:
        """InputError for data or files that the run lacks."""
        session = recipe.open(world)
        data, _ = session.both_loaders
        trainees = session.trainees(data)
        for trainee in trainees:
            trainee.task.train()
        training = dataclasses.replace(session.recipe.training, resume_checkpoint="", init_checkpoint=())
        folder = RunFolder(Identity(recipe.settings.kind, {}), path=tempfile.gettempdir())
        loop = TrainLoop(training, trainees, data, folder, world)
        return Steps(loop, data.batches(0))

    def seconds(self, count: int) -> list[float]:
        """Of each of ``count`` steps, without the wait for their batches.

        By the clock, as training takes them: processor time is the sum of all threads, and a thread's share of it
        leaves out the time in which others wait.
        """
        device, found = self.loop.world.device, []
        for _ in range(count):
            batch = next(self.batches)
            begun = time.perf_counter()
            self.loop.update(batch)
            if device.type != "cpu":
                getattr(torch, device.type).synchronize()
            found.append(time.perf_counter() - begun)
        return found


def reached(recipe: Recipe) -> float:
    """FLOP/s that ten steps of a run reach on this machine's device, with its own settings on one process, as training
    starts it. Their median: what else the machine does only lengthens steps, and must disturb half of them to count."""
    config = recipe.distributed
    reuse_freed_memory()
    torch.set_num_threads(config.threads or threads_said(SINGLE) or usable_cores())
    world = World(SINGLE, use_device(config.device, allow_tf32=config.allow_tf32))
    seconds = statistics.median(Steps.of(recipe, world).seconds(WARM_UP + STEPS)[WARM_UP:])
    step = Step.of(recipe, PlanConfig(gpus=1), networks_of(recipe))
    return step.flops(step.networks[0].probe.checkpointed, recipe.microbatch) / seconds
