"""The one training loop: when to update, log, evaluate, preview, save and stop.

All ranks agree on why a run ends before its limit, a number, by a vote: the largest counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import storage
from ..batch import Batch
from ..checkpoints.run_folder import RunFolder
from ..config import InputError, named
from ..distributed.launch import JobEnd
from ..distributed.world import Vote, World
from ..models.precision import autocast
from ..randomness import Draw
from ..tracking.tracker import Saved, Table, Tracker
from .flight import FILE, flight_line
from .restoring import Start
from .saving import Exports, Saving
from .settings import TrainingConfig
from .task import Meter
from .trainee import Trainee

EVALUATION_SEED = 20210511  # the same draws in every run, so that held-out losses are comparable
TIME = 1  # the limit in hours
SIGNAL = 128  # plus the signal's number: also the exit status
FAILURE = 1000  # an InputError on some rank

#: SIGUSR1 is what Slurm can be asked to send before it preempts a job or its time is up.
SIGNALS = tuple(number for name in ("SIGTERM", "SIGINT", "SIGUSR1") if (number := getattr(signal, name, None)))


class Diverged(InputError):
    """Training has diverged, so that its state is not worth saving."""

    status = 3


@dataclass
class Stop:
    """reason: 0, or ``SIGNAL`` plus the number of the first signal that came."""

    reason: int = 0


@contextlib.contextmanager
def stop_on_signals(tells: bool = False) -> Iterator[Stop]:
    """``SIGNALS`` only set the reason inside the block; a second Ctrl-C interrupts. tells: whether this process says
    so."""
    stop = Stop()

    def request(number, frame):
        if stop.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        if tells and not stop.reason:
            again = "; Ctrl-C again to stop now" if number == signal.SIGINT else ""
            os.write(2, f"\nFinishing this step and saving{again}\n".encode())  # a stream may be in use
        stop.reason = stop.reason or SIGNAL + number

    previous = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class TrainLoop:
    """Trains one or several trainees on the same batches.

    data:     ``data.batches(position)`` yields this rank's slice of successive global batches, endlessly.
    val_data: ``val_data.batches_at(blocks)`` yields some of its ``samples`` held-out samples; None = no evaluation.
    sample_interval: steps between the tasks' previews, of which the last step has one too; 0 = none.
    save_best: write a checkpoint also whenever the mean of the trainees' held-out losses is the lowest so far.
    measure:  more values for each evaluation, with the trainees' first EMA weights in place; a collective.
    frozen:   networks by name that are not trained, but belong to the whole that ``Saved.forms`` calls the model.
    exports:  files beside each checkpoint of a trainee, by ROLE.EXTENSION: functions that write them.

    The state of a run is the state of its trainees, ``step`` (completed updates) and ``samples`` (position in the
    data). Everything else is a function of these, so resuming is exact.

    Every rank executes the same forward passes and collectives, also in evaluation and previews: sharded parameters
    need all ranks in each of them. An InputError that one rank meets between two updates, in its data, its log or a
    checkpoint, is therefore kept as ``failure`` until the next vote, after which all ranks save and raise it.
    """

    config: TrainingConfig
    trainees: Sequence[Trainee]
    data: Any
    run_folder: RunFolder
    world: World
    val_data: Any = None
    sample_interval: int = 0
    save_best: bool = False
    frozen: Mapping[str, nn.Module] | None = None
    measure: Callable[[], dict[str, float]] | None = None
    exports: Exports = lambda trainee, state: {}

    def __post_init__(self) -> None:
        names = [trainee.name for trainee in self.trainees]
        if len(names) > 1 and (len(set(names)) < len(names) or not all(names)):
            raise ValueError(f"the trainees are called {names}, but several need names of their own, for their files")
        trained = self.config, self.trainees, self.run_folder, self.world
        self.saving = Saving(*trained, self.frozen or {}, self.exports)
        self.failure: InputError | None = None
        self.evaluated_step, self.loss = -1, math.nan  # the latest evaluation, and the mean of its losses
        self.last_loss = math.nan  # that was logged, of the first trainee
        self.lowest_loss = self.run_folder.lowest_loss  # of a saved state
        self.last_bad: dict[str, list[int]] = {}  # positions in each trainee's latest step that was not finite
        start = Start(*trained)
        start.restore()
        self.step, self.samples, self.saved_step = start.step, start.samples, start.step

    def save(self, tracker: Tracker | None = None) -> None:
        """Write a complete checkpoint, which ``saving.finish`` waits for, and tell the tracker. Every rank calls it.
        Diverged when training has."""
        self._raise_if_diverged()
        best = self._is_best()
        if best:
            self.lowest_loss = self.loss
        self.saving.save(self.step, self.samples, self.lowest_loss)
        self.saved_step = self.step
        if tracker is not None:
            names = tuple(trainee.name for trainee in self.trainees)
            loss = self.loss if self.evaluated_step >= 0 else None
            forms = self.saving.forms(self.step, self.samples)
            tracker.saved(Saved(self.step, self.samples, names, loss, best, forms))

    def _is_best(self) -> bool:
        """Whether the present state was evaluated, and is better than all saved ones."""
        lowest = math.inf if self.lowest_loss is None else self.lowest_loss
        return self.evaluated_step == self.step and self.loss < lowest

    # -------------------------------------------------------------------------------------------------- the loop itself

    def run(self, tracker) -> None:
        """Train until a limit, a signal or an error, and save.

        Raises, on all ranks, JobEnd after a signal; InputError when the data, the log or a checkpoint failed on any
        rank; Diverged, without saving, when training has diverged.
        """
        try:
            with stop_on_signals(self.world.is_main) as stop:
                reason = self._train(tracker, stop)
                if SIGNAL < reason < FAILURE:
                    tracker.hurry()
                if self.step > self.saved_step:
                    self._attempt(self.save, tracker)
                self._attempt(self.saving.finish)
            self.world.together(self._raise_failure)
        finally:
            self.saving.close()
            tracker.finish()
        if reason > SIGNAL:
            raise JobEnd(reason)

    def _raise_failure(self) -> None:
        if self.failure:
            raise self.failure

    def _train(self, tracker, stop: Stop) -> int:
        """Update until a limit, 0, or until a vote gives a reason to stop, which is returned.

        A step's vote runs during the step before. It is cast when the step's batch is there, so that ranks that have
        none stop together with those that have one.
        """
        if self.is_finished:
            return 0
        config, vote = self.config, Vote(self.world)
        ends = time.monotonic() + 3600 * config.hours if config.hours else None
        logged = time.monotonic(), self.samples
        with contextlib.closing(self.data.batches(self.samples, lambda: bool(stop.reason))) as source:
            upcoming = self._attempt(next, source, None)  # None: a failure, or it has to do with a signal
            vote.cast(self._why_to_stop(stop, ends))
            while True:
                if reason := vote.answer():
                    note = f"Stopping early at step {self.step:,}; the same command resumes the run."
                    self._report(tracker.note, note)
                    return reason
                batch, last = upcoming, self.step + 1 == self.total_steps
                if not last:
                    upcoming = self._attempt(next, source, None)
                    vote.cast(self._why_to_stop(stop, ends))
                assert batch is not None  # or the vote would have had a reason
                self.update(batch)
                self._report(tracker.progress, self.step)
                if self.step % config.log_interval == 0 or last:
                    logged = self._log(tracker, *logged)
                if self.val_data is not None and (self.step % config.eval_interval == 0 or last):
                    self._evaluate(tracker)
                if self.sample_interval and (self.step % self.sample_interval == 0 or last):
                    self._show(tracker)
                if config.saves_at(self.step) and self.step > self.saved_step:
                    self._attempt(self.save, tracker)
                if last:
                    return 0

    def _why_to_stop(self, stop: Stop, ends: float | None) -> int:
        """This rank's vote."""
        self._attempt(self.saving.check)
        if self.failure:
            return FAILURE
        return stop.reason or (TIME if ends is not None and time.monotonic() > ends else 0)

    def _attempt(self, call: Callable[..., Any], *arguments) -> Any:
        """What a call returns; None after an InputError, which is kept as this rank's ``failure``. Diverged, which all
        ranks see at once, passes."""
        try:
            return call(*arguments)
        except Diverged:
            raise
        except InputError as error:
            self.failure = self.failure or error
            return None

    def _report(self, call: Callable[..., object], *arguments) -> None:
        """Tell the tracker, or write to the log directory, unless something has failed already."""
        if not self.failure:
            self._attempt(call, *arguments)

    @property
    def total_steps(self) -> int | None:
        """Number of updates after which the run ends; None when only ``hours`` limits it."""
        return self.config.last_step(self.world.size, self.step, self.samples)

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its limit in steps or samples."""
        steps, samples = self.config.iterations, self.config.samples
        return bool((steps and self.step >= steps) or (samples and self.samples >= samples))

    def update(self, batch: Batch) -> None:
        """One step of each trainee on this rank's slice of the global batch."""
        device = self.world.device
        pieces = [
            (piece.to(device), Draw(self.config.seed, piece.index, device))
            for piece in batch.split(self.config.microbatch or len(batch))
        ]
        for trainee in self.trainees:
            trainee.update(pieces, self.step)
        self.step += 1
        self.samples += len(batch) * self.world.size

    def _log(self, tracker, since: float, samples_then: int) -> tuple[float, int]:
        self._raise_if_diverged()
        scalars: dict[str, float] = {}
        for trainee in self.trainees:
            scalars |= {trainee.prefix + name: value for name, value in trainee.scalars().items()}
        now, self.last_loss = time.monotonic(), scalars.get(self.trainees[0].prefix + "loss", math.nan)
        scalars["samples"] = self.samples
        scalars["samples_per_second"] = (self.samples - samples_then) / max(now - since, 1e-9)
        self._report(tracker.log, self.step, scalars)
        return now, self.samples

    def _raise_if_diverged(self) -> None:
        """Write down the steps that were not finite; Diverged, with the last one's samples, after too many in a row."""
        for trainee in self.trainees:
            self._write_flight(trainee)
            count = trainee.consecutive_bad_steps()
            if count < self.config.max_bad_steps:
                continue
            positions = self.last_bad.get(trainee.name, [])
            names = ", ".join(self.data.describe(position) for position in positions[:8])
            names += ", …" if len(positions) > 8 else ""
            raise Diverged(
                f"the gradient was not finite in {count} consecutive steps ({named('max_bad_steps')} is "
                f"{self.config.max_bad_steps}), so training has diverged: lower {named('lr')} or raise "
                f"{named('warmup_steps')}. The last of these steps had the samples {names}. The checkpoints written so "
                f"far are intact; {FILE} has these steps, and diff-dalle replay computes one again"
            )

    def _write_flight(self, trainee: Trainee) -> None:
        steps, missed = trainee.flight.read()
        if not steps:  # on no rank, since all skip the same steps
            return
        everyone = list(zip(*self.world.gather(steps), strict=True))
        self.last_bad[trainee.name] = sorted(position for each in everyone[-1] for position in each.position)
        if self.world.is_main:
            text = "".join(flight_line(trainee.name, ranks, missed if not i else 0) for i, ranks in enumerate(everyone))
            self._report(storage.append_text, storage.join(self.run_folder.path, FILE), text)

    # ------------------------------------------------------------------------------------------ evaluation and previews

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Held-out values of each trainee by name, with all trainees' first EMA weights in place, at fixed draws; none
        when samples cannot be read on some rank.

        Blocks of samples are dealt to the ranks, so the values depend neither on their number nor on the micro-batch.
        """
        with evaluating(self.trainees):
            return {trainee.name: self._held_out(trainee) for trainee in self.trainees}

    def _held_out(self, trainee: Trainee) -> dict[str, float]:
        total = min(self.config.eval_samples, self.val_data.samples)
        block = min(trainee.task.held_out_block, total)
        count, meter = total // block, Meter(self.world.device)
        numbers = range(self.world.rank, -(-count // self.world.size) * self.world.size, self.world.size)
        # A rank for which no block is left repeats the last one, uncounted: every rank executes as many forwards.
        starts = (min(number, count - 1) * block for number in numbers)
        with contextlib.closing(self.val_data.batches_at([range(start, start + block) for start in starts])) as batches:
            for number in numbers:
                batch = self._attempt(next, batches)
                if self.world.any(self.failure is not None):
                    return {}
                draw = Draw(EVALUATION_SEED, batch.index, self.world.device)
                values = trainee.task.held_out(batch.to(self.world.device), draw)
                if number < count:
                    meter.add(values)
        return meter.read(self.world)

    def _evaluate(self, tracker) -> None:
        scalars: dict[str, float] = {}
        means: list[float] = []
        for trainee, values in zip(self.trainees, self.evaluate().values(), strict=True):
            if not values:
                return
            scalars |= {f"{trainee.prefix}held_out/{name}": value for name, value in values.items()}
            means.append(values["loss"])
            if self.world.is_main:
                self._tell(tracker, trainee, *trainee.task.findings(values))
            if self.config.keep_best:
                self._report(self.saving.keep_best, trainee, self.step, self.samples, values["loss"])
        if self.measure:
            with evaluating(self.trainees):
                scalars |= self._attempt(self.measure) or {}
        self._report(tracker.log, self.step, scalars)
        self.evaluated_step, self.loss = self.step, statistics.fmean(means)
        if self.save_best and self.world.any(self._is_best()):
            self._attempt(self.save, tracker)

    def _show(self, tracker) -> None:
        with evaluating(self.trainees):
            previews = [trainee.task.previews() for trainee in self.trainees]
        for trainee, given in zip(self.trainees, previews, strict=True):
            for name, shown in given.items():
                call = tracker.table if isinstance(shown, Table) else tracker.images
                self._report(call, self.step, trainee.prefix + name, shown)
            if self.world.is_main:
                self._tell(tracker, trainee, *trainee.task.training_findings())

    def _tell(self, tracker, trainee: Trainee, text: str, figures: Mapping[str, np.ndarray]) -> None:
        """Report what a task has found."""
        if text:
            owner = f", {trainee.name}" if trainee.name else ""
            self._report(tracker.note, f"Step {self.step:,}{owner}: {text}")
        for name, figure in figures.items():
            self._report(tracker.figure, self.step, trainee.prefix + name, figure)


@contextlib.contextmanager
def evaluating(trainees: Sequence[Trainee]) -> Iterator[None]:
    """The trainees' networks in evaluation mode, with their first EMA weights in place, without gradients."""
    with contextlib.ExitStack() as stack:
        for trainee in trainees:
            if trainee.emas:
                stack.enter_context(trainee.emas[0].in_place())
            trainee.task.eval()
            stack.callback(trainee.task.train)
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast(trainees[0].precision, trainees[0].world.device))
        yield
