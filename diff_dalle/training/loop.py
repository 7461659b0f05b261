"""The one training loop: when to update, log, evaluate, show, save and stop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..batch import Batch
from ..checkpoints.checkpoint import Identity, load_file, load_weights
from ..checkpoints.run_folder import CheckpointSet, RunFolder, changed_settings, find_set
from ..config import option
from ..distributed.world import Vote, World
from ..errors import InputError, quantity
from ..randomness import Draw
from .precision import PRECISIONS, autocast
from .trainee import Meter, Trainee

EVALUATION_SEED = 20210511  # held-out losses use the same draws in every run, so that runs can be compared


@dataclass(frozen=True)
class TrainingConfig:
    """Training"""

    batch_size: int = option(64, "samples per process and step", free=True)
    microbatch: int = option(0, "samples that go through the network at once (memory follows it, the result does not); "
                             "0 = the whole batch", free=True)  # fmt: skip
    iterations: int = option(300_000, "stop after so many steps, counted from the beginning of the run; 0 = no limit",
                             free=True)  # fmt: skip
    samples: int = option(
        0, "stop after so many samples, counted from the beginning of the run; 0 = no limit", free=True
    )
    hours: float = option(0.0, "save and stop after so many hours of this session; 0 = no limit", free=True)
    seed: int = option(0, "key of the data order and of every random number")
    precision: str = option("auto", "arithmetic of the network; auto takes bf16 on GPUs that have it, else fp32",
                            choices=PRECISIONS)  # fmt: skip
    logdir: str = option("", "folder for logs and checkpoints; empty = $OPENAI_LOGDIR, else a fresh temporary folder",
                         free=True)  # fmt: skip
    resume_checkpoint: str = option("", "a checkpoint file of another log directory to continue from", free=True)
    init_checkpoint: str = option("", "a model or EMA file whose weights the run starts from", free=True)
    log_interval: int = option(50, "steps between log lines", free=True)
    save_interval: int = option(5000, "steps between checkpoints; one more is written at the end", free=True)
    keep_checkpoints: int = option(0, "how many of the latest checkpoints to keep; 0 = all", free=True)
    eval_interval: int = option(1000, "steps between evaluations on val_data_dir", free=True)
    eval_samples: int = option(1024, "held-out samples per evaluation; fewer if there are fewer", free=True)
    val_data_dir: tuple[str, ...] = option((), "held-out shards, named like data_dir; none = no evaluation", free=True)
    keep_best: bool = option(False, "keep the weights with the lowest held-out loss as best.pt", free=True)
    max_bad_steps: int = option(20, "stop when so many steps in a row have a gradient that is not finite", free=True)

    def __post_init__(self):
        for name in ("batch_size", "log_interval", "save_interval", "eval_interval", "eval_samples", "max_bad_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("microbatch", "iterations", "samples", "hours", "keep_checkpoints"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}, but must not be negative")
        if not (self.iterations or self.samples or self.hours):
            raise InputError("iterations, samples and hours are all 0: the run would never end; set one of them")
        if self.resume_checkpoint and self.init_checkpoint:
            raise InputError("resume_checkpoint and init_checkpoint exclude each other: continue a run, or start one")


class TrainLoop:
    """Trains one or several trainees on the same batches.

    data:     its ``batches(position)`` yields this rank's slice of successive global batches, without end.
    val_data: its ``batch_at(positions)`` gives held-out samples, ``samples`` their number; None = no evaluation.
    sample_interval: steps between the tasks' previews; 0 = none.

    The state of a run is its trainees' states, ``step`` (updates done) and ``samples`` (the position in the data);
    everything else follows from them, so continuing is exact.
    """

    def __init__(self, config: TrainingConfig, trainees: Sequence[Trainee], data, run: RunFolder, world: World,
                 val_data=None, sample_interval: int = 0):  # fmt: skip
        self.config, self.trainees, self.data, self.run_folder = config, trainees, data, run
        self.world, self.val_data, self.sample_interval = world, val_data, sample_interval
        self.step = self.samples = self.saved_step = 0
        self.restore()

    # ------------------------------------------------------------------------------------------- saving and restoring

    def restore(self) -> None:
        """Continue from the log directory's latest complete checkpoint, or start as the settings say."""
        if self.run_folder.checkpoints:
            self._load_set(self.run_folder, self.run_folder.checkpoints[-1])
        elif self.config.resume_checkpoint:
            other, entry = find_set(self.config.resume_checkpoint)
            self._load_set(other, entry)
            changed = changed_settings(other.identity.config, self.run_folder.identity.config)
            if changed:
                self.world.print(f"Note: settings that are not those of {other.path}: {', '.join(changed)}")
        elif self.config.init_checkpoint:
            self._start_from_weights(self.config.init_checkpoint)
        self.saved_step = self.step

    def _load_set(self, run: RunFolder, entry: CheckpointSet) -> None:
        self._check_identity(run.identity, run.path)
        for trainee in self.trainees:
            path = run.file(entry, f"{trainee.prefix}model")
            load_weights(trainee.task.model, load_file(path, ("model",)), path)
            for ema in trainee.emas:
                ema.load_state(load_file(run.file(entry, trainee.prefix + ema.role), ("ema",))["state"])
            trainee.load_optimizer(load_file(run.file(entry, f"{trainee.prefix}optimizer"), ("optimizer",))["state"])
        self.step, self.samples = entry.step, entry.samples
        self.world.print(f"Continuing from step {self.step:,} ({quantity(self.samples, 'sample')}) in {run.path}")

    def _start_from_weights(self, path: str) -> None:
        content = load_file(path)
        self._check_identity(Identity(content["kind"], content["config"], content["tokenizer"]), path)
        for trainee in self.trainees:
            load_weights(trainee.task.model, content, path)
            for ema in trainee.emas:
                ema.load_state(content["state"])
        self.world.print(f"Starting from the weights of {path}")

    def _check_identity(self, found: Identity, path: str) -> None:
        """InputError when what ``path`` holds is of another kind or reads other tokens than this run."""
        own = self.run_folder.identity
        if found.kind != own.kind:
            raise InputError(f"{path} holds a {found.kind}, not a {own.kind}")
        if found.tokenizer != own.tokenizer:
            raise InputError(f"{path} was trained with tokenizer {found.tokenizer}, this run has {own.tokenizer}; "
                             "set --bpe_path to match")  # fmt: skip

    def save(self) -> None:
        """Write a complete checkpoint, from rank 0. InputError when training has diverged."""
        self._raise_if_diverged()
        states = {}
        for trainee in self.trainees:
            states |= {trainee.prefix + role: state for role, state in trainee.states().items()}
        if self.world.is_main:
            self.run_folder.save(self.step, self.samples, states, self.config.keep_checkpoints)
        self.saved_step = self.step

    # -------------------------------------------------------------------------------------------------- the loop itself

    def run(self, tracker) -> None:
        """Train until the limit, a signal, or the end of the hours; SIGTERM and Ctrl-C save before they leave."""
        config, started, logged = self.config, time.monotonic(), (time.monotonic(), self.samples)
        try:
            with _stop_on_signal() as stop:
                batches, leave = self.data.batches(self.samples), Vote(self.world)
                while not self._finished():
                    out_of_time = bool(config.hours) and time.monotonic() - started > config.hours * 3600
                    if leave.cast(out_of_time or stop.requested):
                        tracker.note(f"Stopping early at step {self.step:,}; the same command continues the run.")
                        break
                    self._update(next(batches))
                    tracker.progress(self.step)
                    if self.step % config.log_interval == 0 or self._finished():
                        logged = self._log(tracker, *logged)
                    if self.val_data is not None and (self.step % config.eval_interval == 0 or self._finished()):
                        self._evaluate(tracker)
                    if self.sample_interval and self.step % self.sample_interval == 0:
                        self._show(tracker)
                    if self.step % config.save_interval == 0:
                        self.save()
                if self.step > self.saved_step:
                    self.save()
        finally:
            tracker.finish()

    @property
    def total_steps(self) -> int | None:
        """Updates after which the run ends, from its beginning; None when only ``hours`` ends it."""
        config = self.config
        left = max(0, config.samples - self.samples)
        by_samples = self.step + -(-left // (config.batch_size * self.world.size)) if config.samples else 0
        return min((steps for steps in (config.iterations, by_samples) if steps), default=None)

    def _finished(self) -> bool:
        """Whether the run has done what its limits in steps and samples ask for."""
        steps, samples = self.config.iterations, self.config.samples
        return bool((steps and self.step >= steps) or (samples and self.samples >= samples))

    def _update(self, batch: Batch) -> None:
        """One step of every trainee on this rank's slice of the global batch."""
        device = self.world.device
        pieces = batch.split(self.config.microbatch or len(batch))
        pieces = [
            (piece.to(device, non_blocking=True), Draw(self.config.seed, piece.index, device)) for piece in pieces
        ]
        for trainee in self.trainees:
            trainee.update(pieces, self.step)
        self.step += 1
        self.samples += len(batch) * self.world.size

    def _log(self, tracker, since: float, samples_then: int) -> tuple[float, int]:
        self._raise_if_diverged()
        scalars = {}
        for trainee in self.trainees:
            scalars |= {trainee.prefix + name: value for name, value in trainee.scalars().items()}
        now = time.monotonic()
        scalars["samples"] = self.samples
        scalars["samples_per_second"] = (self.samples - samples_then) / max(now - since, 1e-9)
        tracker.log(self.step, scalars)
        return now, self.samples

    def _raise_if_diverged(self) -> None:
        """Stop when too many steps in a row were not finite, naming the samples of the last one."""
        for trainee in self.trainees:
            row = trainee.longest_bad_row()
            if row < self.config.max_bad_steps:
                continue
            positions = sorted(p for part in self.world.gather(trainee.bad_samples.tolist()) for p in part)
            names = ", ".join(self.data.describe(position) for position in positions[:8])
            raise InputError(
                f"the gradient was not finite in {row} steps in a row (max_bad_steps is {self.config.max_bad_steps}), "
                f"so training has diverged; lower --lr or raise --warmup_steps. The last such step had the samples "
                f"{names}{', …' if len(positions) > 8 else ''}. The checkpoints written so far are intact"
            )

    # --------------------------------------------------------------------------------------------- looking at the model

    def evaluate(self) -> dict[str, dict[str, float]]:
        """By trainee's name, held-out values of its first average (of its weights if it has none), at fixed draws.

        Blocks of samples are dealt to the ranks, so the values depend neither on their number nor on the micro-batch.
        """
        values = {}
        for trainee in self.trainees:
            total = min(self.config.eval_samples, self.val_data.samples)
            block = min(trainee.task.held_out_block, total)
            starts = range(self.world.rank * block, total - block + 1, self.world.size * block)
            meter = Meter(self.world.device)
            with evaluating(trainee):
                for start in starts:
                    batch = self.val_data.batch_at(range(start, start + block))
                    draw = Draw(EVALUATION_SEED, batch.index, self.world.device)
                    meter.add(trainee.task.held_out(batch.to(self.world.device), draw))
            values[trainee.name] = meter.read(self.world)
        return values

    def _evaluate(self, tracker) -> None:
        scalars = {}
        for trainee, values in zip(self.trainees, self.evaluate().values(), strict=True):
            scalars |= {f"{trainee.prefix}held_out/{name}": value for name, value in values.items()}
            text, pictures = trainee.task.findings(values)
            if text:
                whose = f", {trainee.name}" if trainee.name else ""
                tracker.note(f"Step {self.step:,}{whose}: {text}")
            for name, picture in pictures.items():
                tracker.figure(self.step, trainee.prefix + name, picture)
            if self.config.keep_best and self.world.is_main:
                role, state = trainee.evaluated()
                self.run_folder.keep_best(trainee.name, self.step, self.samples, values["loss"], state, role)
        tracker.log(self.step, scalars)

    def _show(self, tracker) -> None:
        if not self.world.is_main:
            return
        for trainee in self.trainees:
            with evaluating(trainee):
                pictures = trainee.task.previews()
            for name, picture in pictures.items():
                tracker.images(self.step, trainee.prefix + name, picture)


@contextlib.contextmanager
def evaluating(trainee: Trainee) -> Iterator[None]:
    """The trainee's network in evaluation mode, holding its first average."""
    average = trainee.emas[0].in_place() if trainee.emas else contextlib.nullcontext()
    trainee.task.eval()
    try:
        with average, torch.no_grad(), autocast(trainee.precision, trainee.world.device):
            yield
    finally:
        trainee.task.train()


@dataclass
class _Stop:
    requested: bool = False


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[_Stop]:
    """Inside the block, SIGTERM and the first Ctrl-C only set ``requested``; a second Ctrl-C interrupts."""
    stop = _Stop()

    def request(number, frame):
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.requested = True

    previous = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
