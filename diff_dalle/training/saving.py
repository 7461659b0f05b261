"""What a run writes of its trainees: checkpoints, the best weights, and the forms that trackers take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from torch import nn

from .. import storage
from ..checkpoints.bundle import write_bundle
from ..checkpoints.checkpoint import write_networks
from ..checkpoints.consolidating import Consolidation, gathered
from ..checkpoints.run_folder import RunFolder
from ..distributed.world import World
from .settings import TrainingConfig
from .trainee import Trainee

#: Of a trainee, files beside its checkpoints, by ROLE.EXTENSION: functions that write them.
Exports = Callable[[Trainee], Mapping[str, Callable[[BinaryIO], object]]]


class Saving:
    """Every rank calls its methods, but ``forms`` are written on rank 0 alone.

    frozen: networks by name that are not trained, but belong to the whole that is called the model.
    exports: not for sharded weights.
    """

    def __init__(
        self,
        config: TrainingConfig,
        trainees: Sequence[Trainee],
        run: RunFolder,
        world: World,
        frozen: Mapping[str, nn.Module],
        exports: Exports,
    ):
        self.config, self.trainees, self.run, self.world, self.frozen = config, trainees, run, world, frozen
        self.exports = exports
        self.consolidation = Consolidation()

    def save(self, step: int, samples: int) -> None:
        """Write a complete checkpoint: from rank 0, or from all ranks into a folder when weights are sharded."""
        states: dict[str, dict[str, Any]] = {}
        exports: dict[str, Callable[[BinaryIO], object]] = {}
        for trainee in self.trainees:
            states |= {trainee.prefix + role: state for role, state in trainee.states().items()}
            exports |= {trainee.prefix + name: write for name, write in self.exports(trainee).items()}
        batch = self.config.batch_size * self.world.size
        saved = step, samples, states, self.config.keep_checkpoints, self.config.backs_up_at, batch
        if any(trainee.is_sharded for trainee in self.trainees):
            self.finish()  # a checkpoint that is read is not dropped
            self.run.save_sharded(self.world, *saved)
            if self.config.sharding.consolidate and self.world.is_main:
                self._consolidate()
        elif self.world.is_main:
            self.run.save(*saved, exports)

    def finish(self) -> None:
        """Wait for what is written in the background. InputError, on all ranks, when that has failed."""
        self.world.on_main(self.consolidation.wait)

    def _consolidate(self) -> None:
        entry = self.run.checkpoints[-1]
        if entry.folder:
            self.consolidation.start(storage.join(self.run.path, entry.folder), self.run.path)

    def forms(self, step: int, samples: int) -> dict[str, Callable[[BinaryIO], None]]:
        """What writes the latest checkpoint, of this step, as one file: the whole run, or the networks."""

        def checkpoint(file: BinaryIO) -> None:
            self._consolidate()
            self.consolidation.wait()
            write_bundle(file, self.run)

        def model(file: BinaryIO) -> None:
            """As they are evaluated, without what training needs."""
            states = {name: module.state_dict() for name, module in self.frozen.items()}
            for trainee in self.trainees:
                role, state = trainee.evaluated()
                if trainee.is_sharded:
                    state = self.run.load(self.run.checkpoints[-1], trainee.name, role)[0]["state"]
                states[trainee.name] = state
            role = self.trainees[0].evaluated()[0]
            write_networks(file, role, self.run.identity, step, samples, states)

        return {"checkpoint": checkpoint, "model": model}

    def keep_best(self, trainee: Trainee, step: int, samples: int, loss: float) -> None:
        """Write a trainee's evaluated weights as the best if their held-out loss is the lowest so far."""
        if not self.world.broadcast(self.run.is_best(trainee.name, loss)):
            return
        role, state = trainee.evaluated()
        with gathered(state, self.world, self.run.path) as whole:
            if self.world.is_main:
                self.run.keep_best(trainee.name, step, samples, loss, whole, role)
