"""Where a fault is drilled: a folder, tiny runs of one kind of network in it, and the run that met no fault."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from script_running import losses
from tiny_settings import CLASSIFIER_RUN, GENERATOR_RUN, flags

from diff_dalle.config import InputError

from .contract import require
from .inside import Injection, planned
from .processes import INSIDE, SCRIPTS, Job, Outcome, environment

STEPS, SAVED_EVERY, BATCH = 12, 4, 8
TOLERANCE = 1e-5  # relative, of losses on another number of processes
ROLES = ("model", "ema", "optimizer")
OWN = {"text_length": 16, "diffusion_steps": 50}
OWN |= {"save_interval": SAVED_EVERY, "iterations": STEPS, "batch_size": BATCH}
GENERATOR = {**GENERATOR_RUN, **OWN}
UPSAMPLER = {**GENERATOR, "small_size": 8, "noise_augmentation": 0.3, "gaussian_blur": True, "prediction": "x_start"}
CLASSIFIER = {**CLASSIFIER_RUN, **OWN, "lr_anneal_steps": 0, "warmup_steps": 0, "keep_best": False}
# Script and flags of a tiny training run; a new kind of network joins by a line.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "generator": ("train_generator.py", GENERATOR),
    "classifier": ("train_classifier.py", CLASSIFIER),
    "upsampler": ("train_generator.py", UPSAMPLER),
}


def digest(value: Any) -> str:
    """A hash of nested containers of tensors and plain values."""
    import torch

    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{list(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        elif isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(f"{len(value)}".encode())
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()


@dataclass(frozen=True)
class Result:
    """What a run has saved: the step of its latest checkpoint, a digest of all that is in it, and the logged losses by
    step."""

    step: int
    state: str
    losses: dict[int, float]


def saved(logdir: Path) -> Result | None:
    """The latest checkpoint of a log directory; None without one. InputError when a file of it cannot be read."""
    from diff_dalle.checkpoints.checkpoint import load_file
    from diff_dalle.checkpoints.run_folder import read_run

    run = read_run(str(logdir))
    if run is None or not run.checkpoints:
        return None
    entry = run.checkpoints[-1]
    states = {role: load_file(str(logdir / name), ROLES)["state"] for role, name in entry.files.items()}
    return Result(entry.step, digest(states), losses(logdir))


class Bench:
    """What all faults of a drill share: the data, and the outcomes of runs that met no fault.

    cells: rows of the table are drilled in parallel; each gets a folder of its own.
    """

    def __init__(self, folder: Path, seed: int, quick: bool):
        from diff_dalle.worlds.shapes.scenes import ShapesConfig
        from diff_dalle.worlds.shapes.shards import write_shapes

        self.folder, self.seed, self.quick = folder, seed, quick
        self.world = folder / "world"
        config = ShapesConfig(image_size=16, train_samples=64, val_samples=16, samples_per_shard=16)
        write_shapes(config, str(self.world))
        self._results: dict[str, Result] = {}
        self._lock = threading.Lock()
        self._places = 0

    def place(self, kind: str) -> Place:
        with self._lock:
            self._places += 1
            folder = self.folder / f"{self._places:04d}_{kind}"
        folder.mkdir()
        return Place(self, kind, folder, random.Random(f"{self.seed} {self._places}"))

    def reference(self, kind: str, changed: Mapping[str, Any]) -> Result:
        """What a run of these settings saves when it meets no fault."""
        key = json.dumps([kind, dict(sorted(changed.items()))])
        with self._lock:
            known = self._results.get(key)
        if known is None:
            place = self.place(kind)
            place.run(**changed).succeeded("the run without a fault failed")
            known = place.saved()
            with self._lock:
                self._results[key] = known
            place.clear()
        return known


class Place:
    """One fault with one kind of network: the folder ``path``, in which ``logdir`` is its run's log directory."""

    def __init__(self, bench: Bench, kind: str, path: Path, chance: random.Random):
        self.bench, self.kind, self.path, self.random = bench, kind, path, chance
        self.quick, self.logdir = bench.quick, path / "run"
        self.shards, self.data_dir = bench.world / "train", ""  # a URL instead of the folder, if there is one
        self._jobs = 0

    def own_data(self) -> Path:
        """A copy of the shards for a fault that damages them; the runs of this place read it from now on."""
        self.shards = self.path / "data"
        shutil.copytree(self.bench.world / "train", self.shards, ignore=shutil.ignore_patterns(".*"))
        return self.shards

    def restore_data(self) -> None:
        """Undo what happened to the copy of the shards; their modification times are new."""
        shutil.rmtree(self.shards)
        self.own_data()

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------------------ runs

    def command(self, launcher: Sequence[str] = (), **changed: Any) -> list[str]:
        """The training command, run inside the drill's wrapper. changed: flags."""
        script, settings = KINDS[self.kind]
        given = {**settings, "data_dir": self.data_dir or self.shards, "logdir": self.logdir, **changed}
        return [*(launcher or [sys.executable]), "-m", INSIDE, str(SCRIPTS / script), *flags(given)]

    def start(
        self,
        *injections: Injection,
        launcher: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
        **changed: Any,
    ) -> Job:
        self._jobs += 1
        variables = environment(**{**planned(*injections), **(env or {})})
        output = self.path / f"output_{self._jobs}.txt"
        return Job(self.command(launcher, **changed), output, variables, limits)

    def run(self, *injections: Injection, **options: Any) -> Outcome:
        return self.start(*injections, **options).wait()

    # --------------------------------------------------------------------------------------------------------- results

    def saved(self) -> Result:
        """The latest checkpoint, all of which must be readable."""
        found = self._saved()
        require(found is not None, "no checkpoint was saved")
        assert found is not None
        return found

    def saved_step(self) -> int:
        """The step of the latest checkpoint; 0 without one."""
        found = self._saved()
        return found.step if found else 0

    def _saved(self) -> Result | None:
        try:
            return saved(self.logdir)
        except InputError as error:
            require(False, f"a checkpoint that run.json lists cannot be read: {error}")
            raise

    def logged_step(self) -> int:
        """The last step in the log; 0 without one."""
        path = self.logdir / "progress.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
        return max(steps, default=0)

    def saved_all(self) -> int:
        """The step of the latest checkpoint. Deviation when the log has a later one, which is lost."""
        done, step = self.logged_step(), self.saved_step()
        require(step >= done, f"{done} steps done, {step} saved")
        return step

    def refused(self, outcome: Outcome, *words: str, status: int = 2) -> None:
        """Deviation unless the run ended with a sentence that has these words, and without a traceback."""
        outcome.without_traceback()
        require(outcome.status == status, f"status {outcome.status}, not {status}: {outcome.tail()}")
        errors = " ".join(outcome.errors)
        missing = [word for word in words if word not in errors]
        require(not missing, f"the error does not say {missing}: {errors or outcome.tail()}")

    def lost_little(self, done: int) -> None:
        """Deviation when more steps are lost than since the last save, and while that was written, for which the next
        one waits. done: steps that were completed."""
        step = self.saved_step()
        require(done - step <= 2 * SAVED_EVERY, f"{done - step} steps are lost ({done} done, {step} saved)")

    def continues(self, **changed: Any) -> str:
        """The same command again must end with what the run without a fault has saved."""
        before = self.saved_step()
        outcome = self.run(**changed).succeeded("the same command again failed")
        if before:
            require(f"Resuming at step {before:,}" in outcome.output, f"did not resume at step {before}")
        return f"resumed at step {before}, {self.equal(**changed)}"

    def equal(self, **changed: Any) -> str:
        """Deviation unless the latest checkpoint is the one of a run without faults, bit for bit."""
        keep = {name: value for name, value in changed.items() if name in ("iterations", "save_interval")}
        wanted, found = self.bench.reference(self.kind, keep), self.saved()
        require(found.step == wanted.step, f"ended at step {found.step}, not {wanted.step}")
        require(found.state == wanted.state, "the state differs from that of a run without faults")
        return "equal"

    def close(self, **changed: Any) -> str:
        """Deviation unless every logged loss is that of one process without faults, up to rounding."""
        wanted, found = self.bench.reference(self.kind, changed).losses, losses(self.logdir)
        require(wanted.keys() == found.keys(), f"logged steps {sorted(found)}, not {sorted(wanted)}")
        worst = max(abs(found[step] - loss) / max(1.0, abs(loss)) for step, loss in wanted.items())
        require(worst <= TOLERANCE, f"a loss differs by {worst:.1e}")
        return f"losses equal to {worst:.0e}"


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
