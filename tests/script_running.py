"""The scripts as users run them, at tiny sizes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

from forking import run_ranks, start
from tiny_settings import CLASSIFIER_RUN, GENERATOR_RUN, flags

ROOT = Path(__file__).parent.parent
TWO = [os.path.join(os.path.dirname(sys.executable), "mpiexec"), "-n", "2", sys.executable]
SEVERAL = re.compile(r"--\w+ ")
OWN = {"text_length": 24, "diffusion_steps": 100}
SETTINGS = {
    "train_generator.py": {**GENERATOR_RUN, **OWN},
    "train_classifier.py": {**CLASSIFIER_RUN, **OWN, "dropout_text": 0.1},
}


def environment(**own):
    """This process's, without launchers' variables."""
    launchers = ("PMI_", "OMPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OPENAI_LOGDIR")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**env, "OMP_NUM_THREADS": "1", **own}


def run_here(script, flags, **variables):
    """Run a script's file as ``__main__`` in this process, where torch is already imported: help needs no stand-in for
    it, which the tests that follow would import in the place of parts of torch."""
    sys.modules.setdefault("help_without_torch", types.ModuleType("help_without_torch"))
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", [script, *flags]),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
    ):
        try:
            runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
        except SystemExit as error:
            status = error.code or 0
    return subprocess.CompletedProcess([script, *flags], status, out.getvalue(), err.getvalue())


def run(script, *flags, launcher=(), ranks=1, ok=True, process=False, **variables):
    """Run a script in this process; with a launcher, or if there are several ranks or ``process``, in new ones.

    flags:     a text with several is split as a shell does.
    variables: of the environment.
    """
    flags = [part for each in map(str, flags) for part in (shlex.split(each) if SEVERAL.match(each) else [each])]
    if script in ("sample.py", "evaluate.py"):
        flags += ["--threads", "1"]  # tests run in parallel
    env = environment(**variables)
    command = [str(ROOT / "scripts" / script), *flags]
    if launcher:
        result = subprocess.run(
            [*launcher, *command], capture_output=True, text=True, timeout=300, env=environment(**variables)
        )
    elif ranks > 1 or process:
        result = run_ranks(command, env, ranks)
    else:
        result = run_here(script, flags, **variables)
    if ok:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def training_flags(script, logdir, data, **changed):
    return flags({**SETTINGS[script], "logdir": logdir, "data_dir": data, **changed})


def train(logdir, data, launcher=(), ok=True, script="train_generator.py", process=False, ranks=1, **changed):
    if not launcher and ranks == 1 and not process:
        changed.setdefault("num_workers", 0)  # this process has threads, which must not be forked
    flags = training_flags(script, logdir, data, **changed)
    return run(script, *flags, launcher=launcher, ranks=ranks, ok=ok, process=process)


def start_training(logdir, data, script="train_generator.py", before=(), start_new_session=False, **changed):
    """A training process. before: arguments of python before the script's path."""
    flags = training_flags(script, logdir, data, **changed)
    arguments = [*before, str(ROOT / "scripts" / script), *flags]
    return start(arguments, environment(), merged=True, start_new_session=start_new_session)


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(folder).glob("*.pt")}


def json_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def losses(folder, name="loss"):
    """By step."""
    return {row["step"]: row[name] for row in json_lines(Path(folder) / "progress.jsonl") if name in row}
