"""Time to quality: training seconds until samples show what their captions say, of each of our recipes and diffusers'
example.

All sides train on the same shards of the shapes world, on one thread of the same process, in alternating slices. Each
slice is followed by scores of ShapeEval, of samples from the EMA weights. Only training counts, in CPU seconds, which
other programs on the machine lengthen least. Our learning rates are annealed, so our scores are those of points along
one schedule for each recipe; the peer's rate is constant. Each recipe of ours is trained with several seeds.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Protocol, cast

import numpy as np
import torch
from PIL import Image

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.run_folder import choose_logdir
from diff_dalle.commands.command_line import parse
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

FLAGS = ("--num_workers", "0", "--sample_interval", "0")
# Flags of each recipe. The first, shapes_32 as it was, is what the others are compared with.
RECIPES = {
    "patches of 2": (
        *("--preset", "shapes_32", "--patch_size", "2", "--output_conv", "0", "--channel_mult", "1,2"),
        *("--attention_resolutions", "8", "--schedule_sampler", "uniform", "--lr", "7e-4"),
        *("--iterations", "680", "--lr_anneal_steps", "730", "--guidance_rescale", "0"),
    ),
    "shapes_32": ("--preset", "shapes_32"),
    "narrower": (
        *("--preset", "shapes_32", "--channel_mult", "1,1.5", "--attention_resolutions", "4", "--enc_depth", "1"),
        *("--text_attention", "joint", "--schedule_sampler", "uniform", "--lr", "3e-3"),
        *("--iterations", "620", "--lr_anneal_steps", "840"),
    ),
    "shapes_32_transformer": ("--preset", "shapes_32_transformer"),
}
SEEDS = (0, 1, 2)  # of each recipe
Level = tuple[str, float]
# Scores of ShapeEval to reach; with all of them, in points of one side, it has finished.
LEVELS: tuple[Level, ...] = (("all attributes", 0.85), ("all attributes", 0.95), ("held-out pairs", 0.85))
TASKS = ("attributes", "held-out pairs")  # whose prompts these are
TARGET = 1 / 2  # of the first recipe's seconds, for every level: what a better recipe takes at most
SAMPLER = SamplerConfig("dpm++2m", 12)  # of ours
SAMPLES_AT_ONCE = 50


@dataclass(frozen=True)
class Rules:
    """Of the comparison.

    slice_seconds: of training between two scores of a side, or
    growth:        this fraction of its training so far, if that is longer.
    limit:         the peer stops after this many times the first recipe's seconds.
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
    """Scores after this much training, by name."""

    seconds: float
    steps: int
    rows: Mapping[str, Row]

    def score(self, name: str) -> float:
        return self.rows[name].score if self.rows else 0.0


UNTRAINED = Point(0.0, 0, {})


@dataclass
class Course:
    """A side, and its scores in order. Those of a recipe with several seeds have one name."""

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

    @property
    def images_per_second(self) -> float:
        return self.last.steps * self.batch_size / self.last.seconds

    @property
    def has_all(self) -> bool:
        return all(self.crossing(level) for level in LEVELS)

    def crossing(self, level: Level) -> tuple[float, float] | None:
        """(seconds, steps) at which the score first reaches the level, interpolated between the points before and
        after; None if it does not."""
        (name, value), before = level, UNTRAINED
        for point in self.points:
            if (score := point.score(name)) >= value:
                share = (value - before.score(name)) / (score - before.score(name))
                ends = ((before.seconds, point.seconds), (before.steps, point.steps))
                seconds, steps = (start + share * (end - start) for start, end in ends)
                return seconds, steps
            before = point
        return None


Score = Callable[["Side"], Mapping[str, Row]]


def race(
    ours: Sequence[Side], peer: Side, score: Score, rules: Rules, clock: Callable[[], float] = time.process_time
) -> list[Course]:
    """Train all in alternating slices until each has finished: ours with all levels or at the end of their schedules,
    the peer with all levels or after ``rules.limit`` times the seconds of the first of ours. Returns the courses, the
    peer's last.
    """
    courses = [Course.of(side) for side in (*ours, peer)]
    *mine, theirs = courses
    running, limit = list(zip(ours, mine, strict=True)), math.inf  # of the peer's seconds
    while running or (not theirs.has_all and theirs.last.seconds < limit):
        for side, course in running:
            _advance(side, course, score, rules, clock)
        running = [(side, course) for side, course in running if not (course.has_all or side.finished)]
        if all(side is not ours[0] for side, _ in running):
            limit = rules.limit * mine[0].last.seconds
        if not theirs.has_all and theirs.last.seconds < limit:
            _advance(peer, theirs, score, rules, clock, limit)
    return courses


def _advance(
    side: Side, course: Course, score: Score, rules: Rules, clock: Callable[[], float], limit: float = math.inf
) -> None:
    """One slice, which ends at ``limit`` seconds of training, and its score."""
    last = course.last
    slice_seconds = min(max(rules.slice_seconds, rules.growth * last.seconds), limit - last.seconds)
    start, steps = clock(), last.steps
    while not side.finished and clock() - start < slice_seconds:
        side.step()
        steps += 1
    seconds = last.seconds + clock() - start
    rows = score(side)
    course.points.append(Point(seconds, steps, rows))
    scores = ", ".join(f"{name} {row.score:.2f}" for name, row in rows.items())
    print(f"{side.name}: {seconds:.0f} s, {steps} steps, {scores}", file=sys.stderr, flush=True)


class Ours:
    """The run of a training command, without its files and log."""

    def __init__(self, name: str, run: GeneratorRun, world: World):
        recipe = run.recipe()
        self.name, self.run, self.tokenizer = name, run, cast("Tokenizer", recipe.tokenizer())
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
        """By the guidance of the recipe."""
        tokens, mask = self.tokenizer(list(captions), self.run.model.text.text_length)
        cond = Conditioning(tokens=tokens, mask=mask)
        null = cond.drop(torch.ones(len(captions), dtype=torch.bool))
        size, seeds = (self.run.image_size,) * 2, range(seed, seed + len(captions))
        guidance = self.run.preview.guidance
        batch, process = SampleBatch(self.run.signal, size, seeds, cond, null), SAMPLER.process(self.run.diffusion)
        with evaluating(self.loop.trainees):
            return self.run.signal.to_pixels(sample_batch(self.model, process, batch, SAMPLER, guidance))


def score(side: Side, prompts: Sequence[ShapePrompt]) -> dict[str, Row]:
    """Of an image for each prompt."""
    parts = []
    for first in range(0, len(prompts), SAMPLES_AT_ONCE):
        parts.append(side.sample([prompt.text for prompt in prompts[first : first + SAMPLES_AT_ONCE]], first))
    report = evaluate_shapes(np.concatenate(parts), prompts)
    return {name: report[name] for name, _ in LEVELS}


def train_all(
    rules: Rules,
    shapes: ShapesConfig,
    recipes: Mapping[str, Sequence[str]] = RECIPES,
    flags: Sequence[str] = FLAGS,
    widths: Sequence[int] = WIDTHS,
    seeds: Sequence[int] = SEEDS,
) -> list[Course]:
    """The courses of our recipes, each with all seeds, and the peer. flags: of all our runs. widths: of the peer's
    levels."""
    prompts = shape_prompts(rules.prompts, config=shapes, tasks=TASKS)
    reuse_freed_memory()  # as in every training command
    with tempfile.TemporaryDirectory(prefix="diff_dalle_benchmark_") as folder:
        print("rendering the shapes world", file=sys.stderr, flush=True)
        write_shapes(shapes, folder)
        data = ("--data_dir", str(Path(folder) / "train"))
        named = [(name, ("--seed", str(seed), *own)) for name, own in recipes.items() for seed in seeds]
        runs = [(name, parse(GeneratorRun, [*own, *flags, *data])) for name, own in named]
        first = runs[0][1]
        precision = faster_precision(lambda name: Peer(first, ALONE, name, widths))
        ours = [Ours(name, run, ALONE) for name, run in runs]
        return race(ours, Peer(first, ALONE, precision, widths), lambda side: score(side, prompts), rules)


def _train_on_one_thread() -> list[Course]:
    torch.set_num_threads(1)
    return train_all(Rules(), ShapesConfig())


class Recipe:
    """What is said of a side's courses, one for each seed: medians and ranges."""

    def __init__(self, courses: Sequence[Course]):
        self.courses, self.name, self.seconds = courses, courses[0].name, median(c.last.seconds for c in courses)

    @classmethod
    def of(cls, courses: Sequence[Course]) -> list[Recipe]:
        """Of courses by name, in their order."""
        return [cls([c for c in courses if c.name == name]) for name in dict.fromkeys(c.name for c in courses)]

    def to(self, level: Level) -> list[tuple[float, float]]:
        """(seconds, steps) of each course to the level, in ascending order; infinite if it was not reached."""
        return sorted(course.crossing(level) or (math.inf, math.inf) for course in self.courses)

    def median(self, level: Level) -> float:
        """Seconds to the level; infinite where half of the courses did not reach it."""
        return median(seconds for seconds, _ in self.to(level))

    def ratio(self, first: Recipe, level: Level) -> str:
        """Of the seconds to a level to those of the first; what is known of it if one of them did not reach it."""
        mine, theirs = self.median(level), first.median(level)
        if math.isinf(mine):
            return "not reached" if math.isinf(theirs) else f"> {self.seconds / theirs:.2f}"
        return f"< {mine / first.seconds:.2f}" if math.isinf(theirs) else f"{mine / theirs:.2f}"

    def reached(self, level: Level) -> list[str]:
        """Seconds, steps and images to a level."""
        batch = self.courses[0].batch_size
        ends = max(course.last.seconds for course in self.courses), max(course.last.steps for course in self.courses)
        cells = []
        for column, unit in ((0, 1), (1, 1), (1, batch)):
            cells.append(_range([unit * each[column] for each in self.to(level)], unit * ends[column]))
        return cells

    def points(self) -> Iterator[list[Point]]:
        """Of each slice, of all courses: the last one of those that have finished."""
        for i in range(max(len(course.points) for course in self.courses)):
            yield [course.points[min(i, len(course.points) - 1)] for course in self.courses]

    def last(self, name: str) -> str:
        """The last score: of one course with its interval, of several the median and the range."""
        _, score, low, high = _at([course.last for course in self.courses], name)
        return f"{score:.2f} ({low:.2f}–{high:.2f})"


def _at(points: Sequence[Point], name: str) -> tuple[float, float, float, float]:
    """Seconds, median score and range of points of one slice; of a single one its interval."""
    seconds, scores = max(point.seconds for point in points), [point.score(name) for point in points]
    row = points[0].rows[name]
    low, high = (row.low, row.high) if len(points) == 1 else (min(scores), max(scores))
    return seconds, median(scores), low, high


def _range(values: Sequence[float], end: float) -> str:
    """Median and range of ascending values. end: what those that are infinite are beyond."""
    low, middle, high = (_cell(value, end) for value in (values[0], median(values), values[-1]))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def _cell(value: float, end: float) -> str:
    return f"> {end:,.0f}" if math.isinf(value) else f"{value:,.0f}"


def comparison(courses: Sequence[Course]) -> str:
    """A column for each side, in Markdown: of several seeds the median, and the range in brackets. "> x": the level was
    not reached with x."""
    recipes = Recipe.of(courses)
    first, *others = recipes
    rows: list[list[object]] = [
        ["parameters, M", *(f"{each.courses[0].parameters / 1e6:.1f}" for each in recipes)],
        ["precision", *(each.courses[0].precision for each in recipes)],
        ["images per step", *(each.courses[0].batch_size for each in recipes)],
        ["images per second", *(f"{median(c.images_per_second for c in each.courses):.0f}" for each in recipes)],
    ]
    for level in LEVELS:
        columns = [each.reached(level) for each in recipes]
        for name, *cells in zip(("seconds", "steps", "images"), *columns, strict=True):
            rows.append([f"{name} to {_said(level)}", *cells])
        rows.append([f"seconds / {first.name}", "", *(other.ratio(first, level) for other in others)])
    for name in dict.fromkeys(name for name, _ in LEVELS):
        rows.append([f"last {name}", *(each.last(name) for each in recipes)])
    return markdown_table(["", *(each.name for each in recipes)], rows)


def _said(level: Level) -> str:
    return f"{level[0]} {level[1]}"


def plot(courses: Sequence[Course], name: str) -> Image.Image:
    """A score over seconds of training, and the levels: of one course with its intervals, of several seeds the median
    with the range. A seed that has finished keeps its last score. Raises MissingMatplotlib."""
    series = {recipe.name: [_at(points, name) for points in recipe.points()] for recipe in Recipe.of(courses)}
    levels = {f"{value}": value for of, value in LEVELS if of == name}
    return line_plot(series, "training on one thread, CPU seconds", name, references=levels)


def tables() -> Iterator[str]:
    """The table, how the ratios compare with their target, the versions, and where the plots are."""
    require_matplotlib()
    courses = in_fresh_process(_train_on_one_thread)
    first, *others = Recipe.of(courses)
    yield comparison(courses) + "\n"
    for other in others:
        found = ", ".join(f"{other.ratio(first, level)} to {_said(level)}" for level in LEVELS)
        yield f"seconds, {other.name} / {first.name}: {found}"
    yield f"target of a recipe: at most {TARGET:.2f}"
    yield ", ".join(f"{package} {version(package)}" for package in ("torch", "diffusers"))
    folder = Path(choose_logdir(""))
    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(name for name, _ in LEVELS):
        path = folder / f"time_to_quality_{name.replace(' ', '_')}.png"
        plot(courses, name).save(path)
        yield f"plot: {path}"
