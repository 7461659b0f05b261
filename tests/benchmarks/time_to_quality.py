"""Time to quality: training seconds until samples show what their captions say, ours against diffusers' example.

Both sides train on the same shards of the shapes world, on one thread of the same process, in alternating slices. Each
slice is followed by a score: ShapeEval's "all attributes" of samples from the EMA weights. Only training counts, in CPU
seconds, which other programs on the machine lengthen least. Our learning rate is annealed, so our scores are those of
points along the preset's one schedule; the peer's is constant.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from PIL import Image

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.run_folder import choose_logdir
from diff_dalle.commands.command_line import parse
from diff_dalle.diffusion.guidance import GuidanceConfig
from diff_dalle.diffusion.sampling import SampleBatch, SamplerConfig, sample_batch
from diff_dalle.distributed.devices import reuse_freed_memory
from diff_dalle.distributed.world import ALONE, World
from diff_dalle.evaluation.plots import line_plot, require_matplotlib
from diff_dalle.evaluation.report import markdown_table
from diff_dalle.recipes.generator import GeneratorRun
from diff_dalle.recipes.planning.calibration import Steps
from diff_dalle.text.tokenizer import Tokenizer
from diff_dalle.training.loop import evaluating
from diff_dalle.worlds.shapes.prompts import ShapePrompt, shape_prompts
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shape_eval import Row, evaluate_shapes
from diff_dalle.worlds.shapes.shards import write_shapes

from .peer_diffusers import WIDTHS, Peer, faster_precision
from .timing import in_fresh_process

FLAGS = ("--preset", "shapes_32", "--num_workers", "0", "--sample_interval", "0")
TASK = "all attributes"  # of ShapeEval
LEVELS = (0.5, 0.85)  # scores to reach; at the last one a side has finished
TARGET = 1 / 3  # maximum ratio ours / peer of the seconds to the last level
SAMPLER, GUIDANCE = SamplerConfig("dpm++2m", 12), GuidanceConfig()  # ours
SAMPLES_AT_ONCE = 50


@dataclass(frozen=True)
class Rules:
    """Of the comparison.

    slice_seconds: of training between two scores of a side, or
    growth:        this fraction of its training so far, if that is longer.
    limit:         the peer stops after this many times our seconds to the last level.
    prompts:       captions of a score.
    """

    slice_seconds: float = 25.0
    growth: float = 0.2
    limit: float = 4.0
    prompts: int = 200


class Side(Protocol):
    """What is trained. parameters: of all its networks. precision: in training."""

    name: str
    batch_size: int
    precision: str
    parameters: int

    @property
    def finished(self) -> bool:
        """Whether its schedule has ended."""

    def step(self) -> None:
        """One update."""

    def sample(self, captions: Sequence[str], seed: int) -> np.ndarray:
        """An image for each caption, uint8 [N, H, W, 3], by the EMA weights."""


@dataclass(frozen=True)
class Point:
    """A score after this much training, and its 95 % interval."""

    seconds: float
    steps: int
    score: float
    low: float
    high: float


UNTRAINED = Point(0.0, 0, 0.0, 0.0, 0.0)


@dataclass
class Course:
    """A side, and its scores in order."""

    name: str
    batch_size: int
    precision: str
    parameters: int
    points: list[Point] = field(default_factory=list)

    @classmethod
    def of(cls, side: Side) -> Course:
        return cls(side.name, side.batch_size, side.precision, side.parameters)

    @property
    def last(self) -> Point:
        return self.points[-1] if self.points else UNTRAINED

    def crossing(self, level: float) -> tuple[float, float] | None:
        """(seconds, steps) at which the score first reaches the level, interpolated between the points before and
        after; None if it does not."""
        before = UNTRAINED
        for point in self.points:
            if point.score >= level:
                share = (level - before.score) / (point.score - before.score)
                values = ((before.seconds, point.seconds), (before.steps, point.steps))
                seconds, steps = (start + share * (end - start) for start, end in values)
                return seconds, steps
            before = point
        return None


def race(
    ours: Side,
    peer: Side,
    score: Callable[[Side], Row],
    rules: Rules,
    clock: Callable[[], float] = time.process_time,
) -> tuple[Course, Course]:
    """Train both in alternating slices until both have finished: ours at the last level or the end of its schedule, the
    peer at the last level or after ``rules.limit`` times our seconds to it (or, if ours misses it, all of our seconds).
    """
    mine, theirs = Course.of(ours), Course.of(peer)
    limit = math.inf  # of the peer's seconds
    while True:
        if limit == math.inf:
            _advance(ours, mine, score, rules, clock)
            if mine.last.score >= LEVELS[-1] or ours.finished:
                crossed = mine.crossing(LEVELS[-1])
                limit = rules.limit * (crossed[0] if crossed else mine.last.seconds)
        if theirs.last.score < LEVELS[-1] and theirs.last.seconds < limit:
            _advance(peer, theirs, score, rules, clock, limit)
        elif limit < math.inf:
            return mine, theirs


def _advance(
    side: Side,
    course: Course,
    score: Callable[[Side], Row],
    rules: Rules,
    clock: Callable[[], float],
    limit: float = math.inf,
) -> None:
    """One slice, which ends at ``limit`` seconds of training, and its score."""
    last = course.last
    slice_seconds = min(max(rules.slice_seconds, rules.growth * last.seconds), limit - last.seconds)
    start, steps = clock(), last.steps
    while not side.finished and clock() - start < slice_seconds:
        side.step()
        steps += 1
    seconds = last.seconds + clock() - start
    row = score(side)
    course.points.append(Point(seconds, steps, row.score, row.low, row.high))
    print(f"{side.name}: {seconds:.0f} s, {steps} steps, {row.score:.2f}", file=sys.stderr, flush=True)


class Ours:
    """The run of a training command, without its files and log."""

    name = "ours"

    def __init__(self, run: GeneratorRun, world: World):
        recipe = run.recipe()
        self.run, self.tokenizer = run, cast("Tokenizer", recipe.tokenizer())
        steps = Steps.of(recipe, world)
        self.loop, self.batches = steps.loop, steps.batches
        (trainee,) = self.loop.trainees
        self.model, self.precision, self.batch_size = trainee.task.model, trainee.precision, run.training.batch_size
        self.parameters = sum(p.numel() for p in self.model.parameters())

    @property
    def finished(self) -> bool:
        return self.loop.step == self.loop.total_steps

    def step(self) -> None:
        self.loop.update(next(self.batches))

    def sample(self, captions: Sequence[str], seed: int) -> np.ndarray:
        """By the library's default guidance."""
        tokens, mask = self.tokenizer(list(captions), self.run.model.text.text_length)
        cond = Conditioning(tokens=tokens, mask=mask)
        null = cond.drop(torch.ones(len(captions), dtype=torch.bool))
        size, seeds = (self.run.image_size,) * 2, range(seed, seed + len(captions))
        batch, process = SampleBatch(self.run.signal, size, seeds, cond, null), SAMPLER.process(self.run.diffusion)
        with evaluating(self.loop.trainees):
            return self.run.signal.to_pixels(sample_batch(self.model, process, batch, SAMPLER, GUIDANCE))


def score(side: Side, prompts: Sequence[ShapePrompt]) -> Row:
    """Of an image for each prompt."""
    parts = []
    for first in range(0, len(prompts), SAMPLES_AT_ONCE):
        parts.append(side.sample([prompt.text for prompt in prompts[first : first + SAMPLES_AT_ONCE]], first))
    return evaluate_shapes(np.concatenate(parts), prompts)[TASK]


def train_both(
    rules: Rules, shapes: ShapesConfig, flags: Sequence[str] = FLAGS, widths: Sequence[int] = WIDTHS
) -> tuple[Course, Course]:
    """The courses of ours and the peer. flags: of our run. widths: of the peer's levels."""
    prompts = shape_prompts(rules.prompts, config=shapes, tasks=("attributes",))
    reuse_freed_memory()  # as in every training command
    with tempfile.TemporaryDirectory(prefix="diff_dalle_benchmark_") as folder:
        print("rendering the shapes world", file=sys.stderr, flush=True)
        write_shapes(shapes, folder)
        run = parse(GeneratorRun, [*flags, "--data_dir", str(Path(folder) / "train")])
        precision = faster_precision(lambda name: Peer(run, ALONE, name, widths))
        sides = Ours(run, ALONE), Peer(run, ALONE, precision, widths)
        return race(*sides, lambda side: score(side, prompts), rules)


def _train_on_one_thread() -> tuple[Course, Course]:
    torch.set_num_threads(1)
    return train_both(Rules(), ShapesConfig())


def ratio(ours: Course, peer: Course, level: float) -> str:
    """Ours / peer of the seconds to a level; what is known of it if a side did not reach the level."""
    mine, theirs = ours.crossing(level), peer.crossing(level)
    if mine is None:
        return "not reached" if theirs is None else f"> {ours.last.seconds / theirs[0]:.2f}"
    return f"< {mine[0] / peer.last.seconds:.2f}" if theirs is None else f"{mine[0] / theirs[0]:.2f}"


def _reached(course: Course, level: float) -> list[str]:
    """Seconds, steps and images to a level."""
    crossed = course.crossing(level)
    seconds, steps = crossed or (course.last.seconds, course.last.steps)
    return [f"{'' if crossed else '> '}{value:,.0f}" for value in (seconds, steps, steps * course.batch_size)]


def comparison(ours: Course, peer: Course) -> str:
    """A column for each side, in Markdown. "> x": the level was not reached with x."""
    courses = (ours, peer)
    rate = [f"{each.last.steps * each.batch_size / each.last.seconds:.0f}" for each in courses]
    rows: list[list[object]] = [
        ["parameters, M", *(f"{each.parameters / 1e6:.1f}" for each in courses), ""],
        ["precision", *(each.precision for each in courses), ""],
        ["images per step", *(each.batch_size for each in courses), ""],
        ["images per second", *rate, ""],
    ]
    for level in LEVELS:
        columns = [_reached(each, level) for each in courses]
        ratios = (ratio(ours, peer, level), "", "")
        for name, *cells in zip(("seconds", "steps", "images"), *columns, ratios, strict=True):
            rows.append([f"{name} to {level}", *cells])
    lasts = [each.last for each in courses]
    rows.append(["last score", *(f"{last.score:.2f} ({last.low:.2f}–{last.high:.2f})" for last in lasts), ""])
    return markdown_table(["", ours.name, peer.name, f"{ours.name} / {peer.name}"], rows)


def plot(ours: Course, peer: Course) -> Image.Image:
    """Scores and their intervals over seconds of training, and the levels. Raises MissingMatplotlib."""
    series = {each.name: [(p.seconds, p.score, p.low, p.high) for p in each.points] for each in (ours, peer)}
    levels = {f"{level}": level for level in LEVELS}
    return line_plot(series, "training on one thread, CPU seconds", TASK, references=levels)


def tables() -> Iterator[str]:
    """The table, how the ratio compares with its target, the versions, and where the plot is."""
    require_matplotlib()
    ours, peer = in_fresh_process(_train_on_one_thread)
    yield comparison(ours, peer) + "\n"
    found = f"{ours.name} / {peer.name}: {ratio(ours, peer, LEVELS[-1])}"
    yield f"seconds to {TASK} {LEVELS[-1]}, {found}, target at most {TARGET:.2f}"
    yield ", ".join(f"{package} {version(package)}" for package in ("torch", "diffusers"))
    path = Path(choose_logdir("")) / "time_to_quality.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(ours, peer).save(path)
    yield f"plot: {path}"
