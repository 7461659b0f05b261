"""What a run writes of its trainees: checkpoints, the best weights, and the forms that trackers take.

Training waits for a copy of the state on the host. Files are written from it in the background, those of one step after
those of another, so that there is one copy at most. Sharded checkpoints are written at once: the ranks agree by
collectives on what each writes, and these cannot run beside those of training.
"""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from .. import storage
from ..checkpoints.bundle import write_bundle
from ..checkpoints.checkpoint import file_content, networks_content, write_file
from ..checkpoints.content import replaced
from ..checkpoints.run_folder import RunFolder
from ..checkpoints.shards import consolidate
from ..config import InputError
from ..distributed.parallel import gathered
from ..distributed.world import World
from .settings import TrainingConfig
from .trainee import Trainee

#: What a checkpoint's files with weights hold (as ``load_file`` gives it), by role: model and ema_RATE.
FilesWithWeights = Mapping[str, Mapping[str, Any]]
#: Of a trainee and such files at the moment of saving, files beside its checkpoints, by ROLE.EXTENSION: functions that
#: write them.
Exports = Callable[[Trainee, FilesWithWeights], Mapping[str, Callable[[BinaryIO], object]]]


class Background:
    """Calls in a thread, in the order in which they are given. What one raises is kept until it is asked for, and the
    process does not end before the last one has."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._jobs: list[Future[object]] = []

    def start(self, call: Callable[[], object]) -> None:
        """Call it after all that were given before."""
        self._jobs = [job for job in self._jobs if not job.done() or job.exception()]
        self._jobs.append(self._pool.submit(_call, [call]))

    def join(self) -> None:
        """Wait until all calls have ended. Raises what the first failing one raised, which ``check`` and ``wait`` still
        will."""
        concurrent.futures.wait(self._jobs)
        for job in self._jobs:
            job.result()

    def wait(self) -> None:
        """Wait until all calls have ended. Raises, once, what the first failing one raised."""
        try:
            self.join()
        finally:
            self._jobs.clear()

    def check(self) -> None:
        """Raise, once, what a call raised that has failed by now."""
        if any(job.done() and job.exception() for job in self._jobs):
            self.wait()


def _call(given: list[Callable[[], object]]) -> None:
    given.pop()()  # and let it go, with what it holds, before its end is known


class Snapshot:
    """Copies on the host of states at one step, which later updates leave alone.

    They have the layout of the originals: what shares its memory there does here, also between several states.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        # By the original's address; with the original, since the address of a freed one could be used again.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, state: Any) -> Any:
        """The copy of a state: nested dicts and lists of tensors and plain values."""
        copy = replaced(state, self._copy)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # once for all copies
        return copy

    def _copy(self, tensor: Tensor) -> Tensor:
        original = tensor.untyped_storage()
        if original._cdata not in self._copies:
            data = torch.empty(0, dtype=torch.uint8, device=original.device).set_(original)
            # Pinned, or each copy would wait for the device.
            host = torch.empty(len(data), dtype=torch.uint8, device="cpu", pin_memory=data.is_cuda)
            self._copies[original._cdata] = original, host.copy_(data, non_blocking=data.is_cuda).untyped_storage()
        copy = self._copies[original._cdata][1]
        return torch.empty(0, dtype=tensor.dtype).set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())


@dataclass(eq=False)
class Saving:
    """Every rank calls its methods, but ``forms`` are written on rank 0 alone.

    frozen: networks by name that are not trained, but belong to the whole that is called the model.
    exports: not for sharded weights.
    """

    config: TrainingConfig
    trainees: Sequence[Trainee]
    run: RunFolder
    world: World
    frozen: Mapping[str, nn.Module]
    exports: Exports

    def __post_init__(self) -> None:
        self.sharded = any(trainee.is_sharded for trainee in self.trainees)
        self.run.batch = self.config.batch_size * self.world.size
        self.run.keep = self.config.keep_checkpoints
        self.run.is_backup = self.config.backs_up_at
        self.background = Background()
        self._snapshot: Callable[[], Snapshot | None] = lambda: None  # of what is being written
        self._consolidated = ""

    def save(self, step: int, samples: int, lowest_loss: float | None = None) -> None:
        """Write a complete checkpoint: from rank 0 in the background, or from all ranks into a folder when weights are
        sharded.

        lowest_loss: of a complete checkpoint once this one is. InputError when the previous one could not be written.
        """
        states = {trainee.prefix + role: state for trainee in self.trainees for role, state in trainee.states().items()}
        states |= {f"{name}/model": module.state_dict() for name, module in self.frozen.items()}
        if self.sharded:
            self.finish()  # a checkpoint that is read is not dropped
            self.run.lowest_loss = lowest_loss
            self.run.save(step, samples, states, world=self.world)
            if self.config.sharding.consolidate and self.world.is_main:
                self._consolidate()
        elif self.world.is_main:
            snapshot = self._snapshot_of(step)
            states = snapshot.of(states)
            exports: dict[str, Callable[[BinaryIO], object]] = {}
            for trainee in self.trainees:
                about = self.run.identity, step, samples
                files = {
                    role: file_content(role, *about, states[trainee.prefix + role], trainee.name)
                    for role in trainee.roles[:-1]
                }
                written = self.exports(trainee, files)
                exports |= {trainee.prefix + name: write for name, write in written.items()}

            def write() -> None:
                self.run.lowest_loss = lowest_loss
                self.run.save(step, samples, states, exports)

            self._write(snapshot, write)

    def _wait_for_earlier(self, step: int) -> Snapshot | None:
        """Wait until all is written that is not of this step; returns the snapshot of what is."""
        found = self._snapshot()
        if found is not None and found.step == step:
            return found
        self.background.wait()
        return None

    def _snapshot_of(self, step: int) -> Snapshot:
        snapshot = self._wait_for_earlier(step) or Snapshot(step)
        self._snapshot = weakref.ref(snapshot)
        return snapshot

    def _write(self, snapshot: Snapshot, call: Callable[[], None]) -> None:
        def write(snapshot: Snapshot) -> None:  # which lives as long as this call is ahead
            call()

        self.background.start(partial(write, snapshot))

    def check(self) -> None:
        """InputError, on rank 0, when what is written in the background has failed."""
        self.background.check()

    def finish(self) -> None:
        """Wait for what is written in the background. InputError, on all ranks, when that has failed."""
        self.world.on_main(self.background.wait)

    def close(self) -> None:
        """Wait for what is written in the background, on this rank alone. A failure is only printed: another one has
        ended the run."""
        try:
            self.background.wait()
        except InputError as error:
            self.world.print(f"Warning: {error}")

    def _consolidate(self) -> None:
        """Begin to make files of the latest checkpoint, unless it was the last to begin."""
        folder = self.run.checkpoints[-1].folder
        if folder and folder != self._consolidated:
            self._consolidated = folder
            self.background.start(partial(consolidate, storage.join(self.run.path, folder), self.run.path))

    def forms(self, step: int, samples: int) -> dict[str, Callable[[BinaryIO], None]]:
        """What writes the latest checkpoint, of this step, as one file: the whole run, or the networks."""

        def checkpoint(file: BinaryIO) -> None:
            self.background.join()
            self._consolidate()
            self.background.join()
            write_bundle(file, self.run)

        def model(file: BinaryIO) -> None:
            """As they are evaluated, without what training needs."""
            states = {name: module.state_dict() for name, module in self.frozen.items()}
            for trainee in self.trainees:
                role, state = trainee.evaluated()
                if trainee.is_sharded:
                    state = self.run.load(self.run.checkpoints[-1], trainee.name, role)[0]["state"]
                states[trainee.name] = state
            role = self.trainees[0].evaluated_role
            write_file(file, networks_content(role, self.run.identity, step, samples, states))

        return {"checkpoint": checkpoint, "model": model}

    def keep_best(self, trainee: Trainee, step: int, samples: int, loss: float) -> None:
        """Write a trainee's evaluated weights as the best if their held-out loss is the lowest so far."""
        self.world.on_main(partial(self._wait_for_earlier, step))  # as one of them may be the best so far
        if not self.world.broadcast(self.run.is_best(trainee.name, loss)):
            return
        role, state = trainee.evaluated()
        if trainee.is_sharded:
            state = gathered(state, self.world)
        if self.world.is_main:
            snapshot = self._snapshot_of(step)
            best = trainee.name, step, samples, loss, snapshot.of(state), role
            self._write(snapshot, partial(self.run.keep_best, *best))
