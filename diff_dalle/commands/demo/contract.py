"""What a chapter of the demo is given, how it runs commands, trains networks side by side, and makes a bundled model.

To add a chapter: a file in this folder with a ``Chapter``, and a line in ``chapters.CHAPTERS``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import InputError
from ...distributed.cores import threads_said, usable_cores
from ...distributed.rendezvous import SINGLE
from ..running import as_typed, run_shown, start

#: The flag of sample.py, evaluate.py and share.py that takes each network of a model.
FLAGS = {"generator": "--model_path", "upsampler": "--upsampler_paths", "classifier": "--classifier_path"}
JUDGE = "judge"  # a network that only scores
RENDER = "prepare_data.py shapes --out_dir {shapes} --image_size 64"


@dataclass(frozen=True)
class Job:
    """A command that runs beside others.

    words:  the script and its flags.
    after:  names of the jobs that must have ended. finish: called when it has ended.
    shown:  whether its output goes to the console.
    """

    words: Sequence[object]
    after: tuple[str, ...] = ()
    finish: Callable[[], object] | None = None
    shown: bool = False


@dataclass(frozen=True)
class Demo:
    """home: folder for all files, absolute. quick: train for a fraction of the time."""

    home: Path
    quick: bool

    @property
    def shapes(self) -> Path:
        """The shapes world of most chapters."""
        return self.home / "shapes"

    def words(self, text: str, **names: object) -> list[str]:
        """The words of a command line, in which {home}, {shapes} and {NAME}s stand for a path or another text each."""
        known = {"home": self.home, "shapes": self.shapes, **names}
        return [word.format(**known) for word in text.split()]

    def run(self, text: str, twofold: bool = False, **names: object) -> None:
        """Print a command and run it, ``SCRIPT FLAGS`` as ``words`` reads it. InputError when it fails.

        twofold: in two processes, each on half of the cores, which small networks use better than threads do.
        """
        words, twofold = self.words(text, **names), twofold and _cores() > 1
        environment = {**os.environ, "OMP_NUM_THREADS": str(_half())} if twofold else None
        try:
            run_shown(words, twofold, env=environment)
        except SystemExit as error:
            raise _failed(words) from error

    def run_jobs(self, jobs: Mapping[str, Job]) -> None:
        """Run jobs, by name, two at a time, each on half of the cores (``--threads``), or on all where no other can run
        beside it. The output of such a job, and of the last one, goes to the console, that of others that are not shown
        to files. InputError when one fails, which ends the others.
        """
        waiting, running, done = dict(jobs), {}, set[str]()  # type: ignore[var-annotated]
        *_, last = jobs
        shown = {last, *(name for name, job in jobs.items() if job.shown)}
        logs = self.home / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            while waiting or running:
                ready = [name for name, job in waiting.items() if done.issuperset(job.after)]
                alone = len(ready) == 1 and not running  # all that wait need it
                for name in ready[: 2 - len(running)]:
                    job, log = waiting.pop(name), logs / f"{name}.txt"
                    threads, on_console = _cores() if alone else _half(), alone or name in shown
                    command = [*job.words, "--threads", threads]
                    print(f"\n$ {as_typed(command)}" + ("" if on_console else f"  # see {log}"), flush=True)
                    out = None if on_console else stack.enter_context(log.open("w"))
                    process = start(command, stdout=out, stderr=out)
                    stack.callback(process.wait)
                    stack.callback(process.terminate)
                    running[name] = (process, command)
                time.sleep(0.2)
                for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                    process, command = running.pop(name)
                    if process.returncode:
                        raise _failed(command)
                    if (finish := jobs[name].finish) is not None:
                        finish()
                    done.add(name)


def scoring_precision() -> str:
    """A flag for ``evaluate.py``: bf16 where it is fast, which takes 0.75 to 0.83 of the time, with the same scores."""
    from ...models.precision import has_fast_bf16

    return " --precision " + ("bf16" if has_fast_bf16() else "fp32")


def _cores() -> int:
    return threads_said(SINGLE) or usable_cores()


def _half() -> int:
    return max(1, _cores() // 2)


def _failed(words: Sequence[object]) -> InputError:
    return InputError(f"the demo stopped, because this command failed: {as_typed(words)}")


def draw_pictures(folder: Path, world: Path, count: int, size: tuple[int, int] | None = None) -> None:
    """Held-out pictures of a shapes world, by number. size: height and width, None = the world's."""
    from PIL import Image

    from ...worlds.shapes.render import render
    from ...worlds.shapes.scenes import scene
    from ...worlds.shapes.shards import read_shapes_config

    config = read_shapes_config(str(world))
    folder.mkdir(exist_ok=True)
    for i in range(count):
        Image.fromarray(render(scene(config, i, "val"), size or config.image_size)).save(folder / f"{i}.png")


@dataclass(frozen=True)
class Chapter:
    """An entry of the table.

    run:     trains, samples and scores; returns the path of its report.
    trains:  what, for --help.
    minutes: on two CPU cores, and of the quick form.
    """

    name: str
    run: Callable[[Demo], Path]
    trains: str
    minutes: tuple[int, int]


@dataclass(frozen=True)
class Network:
    """How one of them is trained.

    command: with a preset and flags of its own.
    data:    folders with its shards for training, with commas between them, and for held-out loss.
    quick:   iterations of the quick demo; iterations: otherwise, None = the preset's.
    after:   the networks that are trained before it.
    first:   a folder with other shards to begin on, and for how many steps; it goes on when the others are trained.
    """

    command: str
    data: tuple[Path | str, Path]
    quick: int
    iterations: int | None = None
    after: tuple[str, ...] = ()
    first: tuple[Path, int] | None = None


def run_training(
    demo: Demo, networks: Mapping[str, Network], prefix: str = "", common: tuple[object, ...] = ()
) -> dict[str, Path]:
    """Train networks, each in the folder of its name. Returns their checkpoints by name.

    prefix: of the folders' names. common: flags of all.
    """
    folders = {name: demo.home / f"{prefix}{name}" for name in networks}
    jobs: dict[str, Job] = {}
    for name, how in networks.items():
        iterations, after, (data, held_out) = how.quick if demo.quick else how.iterations, how.after, how.data
        words = [*demo.words(how.command), "--logdir", folders[name], *common, "--val_data_dir", held_out]
        if how.first:
            first, steps = how.first
            begin = ["--data_dir", first, "--iterations", how.quick // 2 if demo.quick else steps]
            jobs[f"{name}_first"] = Job([*words, *begin], after, shown=True)
            after = (f"{name}_first", *(other for other in networks if other != name))
            words += ["--accept_changed_data", True]
        words += ["--data_dir", data, *(["--iterations", iterations] if iterations else [])]
        jobs[name] = Job(words, after)
    demo.run_jobs(jobs)
    return {name: trained_file(folder) for name, folder in folders.items()}


def trained_file(logdir: Path) -> Path:
    """A run's best checkpoint, or its last EMA where it keeps no best one."""
    *_, last = [*sorted(logdir.glob("ema_*.pt")), *logdir.glob("best.pt")]
    return last


@dataclass(frozen=True)
class Recipe:
    """A bundled model.

    networks: by name, of FLAGS and JUDGE; two are trained at a time, and the last one's output is shown.
    shown:    folder of shards of which examples are shown. captions: one from which the vocabulary of so many merges is
              learned.
    sampling: flags of sample.py and evaluate.py. scoring: further ones of evaluate.py.
    card:     what only people know about it, as flags of share.py.
    """

    name: str
    networks: Mapping[str, Network]
    shown: Path
    captions: Path
    merges: int
    prompts: str
    sampling: str
    scoring: str
    card: Mapping[str, Any]


def make_model(demo: Demo, recipe: Recipe) -> Path:
    """Train, sample, score and write the folder ``{name}_model``. Returns the path of the report."""
    name, vocabulary = recipe.name, demo.home / f"{recipe.name}_vocabulary.txt"
    demo.run(
        "prepare_data.py inspect --data_dir {shown} --grid {home}/{name}_examples.png", shown=recipe.shown, name=name
    )
    learn = "train_tokenizer.py --data_dir {captions} --num_merges {merges} --out {vocabulary}"
    demo.run(learn, captions=recipe.captions, merges=recipe.merges, vocabulary=vocabulary)
    files: dict[str, Any] = run_training(demo, recipe.networks, f"{name}_", ("--bpe_path", vocabulary))
    drawing, classifier = (_flags(files, chosen) for chosen in (("generator", "upsampler"), ("classifier",)))
    judge = f"--judge_path {{{JUDGE}}}" if JUDGE in files else ""
    samples, report, folder = (demo.home / f"{name}_{what}" for what in ("samples", "report", "model"))
    sampled = f"{drawing} {recipe.sampling} --logdir {{samples}} --prompts {{prompts}}"
    demo.run(f"sample.py {sampled}", samples=samples, prompts=recipe.prompts, **files)
    scored = f"{drawing} {classifier} {judge} {recipe.sampling} {recipe.scoring} --report_dir {{report}}"
    demo.run(f"evaluate.py {scored}", twofold=True, report=report, **files)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    texts = " ".join(f"--{what} {{{what}}}" for what in recipe.card)
    sent = f"{drawing} {classifier} --to {{folder}} --report_dir {{report}} {texts}"
    demo.run(f"share.py push {sent}", folder=folder, report=report, **files, **recipe.card)
    return report / "report.md"


def _flags(files: Mapping[str, Any], names: Sequence[str]) -> str:
    """The flags of those of the networks that there are."""
    return " ".join(f"{FLAGS[name]} {{{name}}}" for name in names if name in files)
