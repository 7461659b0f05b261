"""The plan of a training run, and its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...config import leaves
from ...data.order import streams_for
from ...evaluation.report import Part, Table, rendered
from ..recipe import Recipe
from .calibration import reached
from .cluster import PlanConfig
from .cost import networks_of
from .step import Option, Step


@dataclass(frozen=True)
class Plan:
    """What a run takes. Pairs are the lowest and the highest of what is assumed.

    steps: of the whole run, None = hours alone limit it.
    found: the ways to compute a step, of which ``best`` is chosen.
    """

    recipe: Recipe
    config: PlanConfig
    step: Step
    steps: int | None
    found: list[Option]
    best: Option

    @staticmethod
    def of(run: Any) -> Plan:
        """run: with a ``PlanConfig`` as its section ``plan``. InputError where nothing fits, and for settings that
        contradict each other."""
        config: PlanConfig = run.plan
        calibrated = reached(run.recipe()) if config.calibrate else None
        recipe: Recipe = run.recipe(config.gpus)
        networks = networks_of(recipe, half=recipe.training.precision != "fp32")
        step = dataclasses.replace(Step.of(recipe, config, networks), calibrated=calibrated)
        found = step.options()
        return Plan(recipe, config, step, _steps(recipe, step), found, step.chosen(found))

    @property
    def images(self) -> int:
        """Per step of all GPUs together."""
        return self.step.batch * self.config.gpus

    @property
    def flops(self) -> int:
        """Per step of all GPUs together."""
        return self.config.gpus * self.step.flops(self.best.layout.checkpoint, self.best.microbatch)

    def hours(self, steps: float) -> tuple[float, float]:
        low, high = self.best.seconds
        return steps * low / 3600, steps * high / 3600

    def dollars(self, steps: float) -> tuple[float, float]:
        (short, long), (low, high) = self.hours(steps), self.config.dollars
        return self.config.gpus * short * low, self.config.gpus * long * high

    def kilowatt_hours(self, steps: float) -> tuple[float, float]:
        (short, long), (low, high) = self.hours(steps), self.config.watts
        return self.config.gpus * short * low / 1000, self.config.gpus * long * high / 1000

    @property
    def affordable(self) -> tuple[int, int]:
        """Steps that the budget pays for, in the worst and in the best case."""
        cheap, dear = self.dollars(1)
        return int(self.config.budget / dear), int(self.config.budget / cheap)

    @property
    def checkpoint_bytes(self) -> int:
        """Of all files of one checkpoint: weights, averages and optimizer."""
        return sum(
            4 * each.parameters * (1 + len(each.optim.ema_rate)) + each.optimizer_bytes for each in self.step.networks
        )

    @property
    def checkpoints(self) -> int | None:
        """The number of checkpoints that stay; None = not known without a number of steps."""
        training, steps = self.recipe.training, self.steps
        saved = None if steps is None else max(1, -(-steps // training.save_interval))
        kept = training.keep_checkpoints
        if not kept:
            return saved
        backups = steps // training.backup_interval if steps and training.backup_interval else 0
        return (kept if saved is None else min(kept, saved)) + backups

    @property
    def images_per_second(self) -> float:
        """The most that all GPUs take together."""
        return self.images / self.best.seconds[0]

    @property
    def workers(self) -> int:
        """Per GPU, so that data never is what a step waits for."""
        return max(1, -(-int(self.images_per_second / self.config.gpus) // int(max(1, self.config.decode_rate))))

    @property
    def shards(self) -> int:
        """As many as have the size that is asked for, and at least one for each stream of the data's order."""
        nodes = -(-self.config.gpus // self.config.gpus_per_node)
        size = self.config.images * self.config.sample_kb * 1e3
        return max(streams_for(nodes), -(-int(size) // int(self.config.shard_mb * 1e6)))

    # -------------------------------------------------------------------------------------------------------- the text

    def __str__(self) -> str:
        parts = [self._head(), self._options(), self._choice(), self._memory(), *self._times(), self._data()]
        return rendered([*parts, self._assumed()], aligned=True)

    def _head(self) -> str:
        config, networks = self.config, self.step.networks
        names = ", ".join(each.trainee for each in networks if each.trainee)
        parameters = sum(each.parameters for each in networks) / 1e6
        memory = config.gpu_memory or config.kind.memory
        kind = self.recipe.settings.kind
        what = f"{kind} ({names})" if names else kind
        return (
            f"A {what} of {parameters:,.1f} M parameters on {config.gpus} × {config.gpu} ({memory:g} GiB, of which "
            f"{config.usable / 2**30:,.1f} for tensors), {self.step.batch} images a GPU and step, {self.images:,} in "
            "all."
        )

    def _options(self) -> Table:
        rows = []
        for each in self.found:
            times = [f"{seconds:.3g}" for seconds in each.seconds]
            fitting = each.microbatch if each.fits else "does not fit"
            layout, mark = each.layout, "←" if each is self.best else ""
            rows.append([layout.parallel, layout.checkpoint, fitting, self._size(each.memory.total), *times, mark])
        header = ["parallel", self._flag, "largest micro-batch", f"{self._unit} a GPU"]
        return Table([*header, "s a step, at least", "at most", "chosen"], rows)

    @property
    def _flag(self) -> str:
        return self.step.networks[0].probe.checkpoint_flag

    def _choice(self) -> str:
        layout, known = self.best.layout, {leaf.name for leaf in leaves(type(self.recipe.settings)) if leaf.has_flag}
        settings: dict[str, object] = {"parallel": layout.parallel} if self.config.gpus > 1 else {}
        settings |= {self._flag: layout.checkpoint, "batch_size": self.step.batch}
        settings |= {"microbatch": self.best.microbatch, "num_workers": self.workers}
        flags = [f"--{name} {value}" for name, value in settings.items() if name in known]
        others = [f"{name} {value}" for name, value in settings.items() if name not in known]
        in_file = [f"a GPU, in the file's own terms: {', '.join(others)}"] if others else []
        return f"Settings: {'; '.join([*([' '.join(flags)] if flags else []), *in_file])}"

    def _memory(self) -> Table:
        memory = self.best.memory
        rows = [[name, self._size(size)] for name, size in {**vars(memory), "all": memory.total}.items() if size]
        return Table(["memory a GPU", self._unit], rows)

    @property
    def _unit(self) -> str:
        return "GiB" if self.best.memory.total >= 2**30 else "MiB"

    def _size(self, size: int) -> str:
        return f"{size / (2**30 if self._unit == 'GiB' else 2**20):,.2f}"

    def _times(self) -> Iterator[Part]:
        per_step, per_image, steps = self.flops, self.flops / self.images, self.steps
        lines = [f"{per_image / 1e9:,.1f} GFLOPs an image, forward and backward; {per_step / 1e12:,.1f} TFLOPs a step."]
        rows = [["seconds a step", *(f"{value:.3g}" for value in self.best.seconds)]]
        rows += [["images a second", *(f"{self.images / value:,.0f}" for value in reversed(self.best.seconds))]]
        if steps is None:
            lines.append("Only hours limit the run: set --iterations or --samples for days, energy and cost.")
        else:
            lines.append(f"{steps:,} steps are {steps * self.images:,} images and {steps * per_step:.2e} FLOPs.")
            rows += [["days", *(f"{value / 24:,.3g}" for value in self.hours(steps))]]
            rows += [["energy, kWh", *(f"{value:,.3g}" for value in self.kilowatt_hours(steps))]]
            rows += [["cost, US dollars", *(f"{value:,.2f}" for value in self.dollars(steps))]]
        if self.config.budget:
            least, most = self.affordable
            lines.append(
                f"${self.config.budget:,.0f} pay for {least:,} to {most:,} steps, {least * self.images:,} to "
                f"{most * self.images:,} images."
            )
        yield "\n".join(lines)
        yield Table(["", "lowest", "highest"], rows)

    def _data(self) -> str:
        config, lines = self.config, []
        if config.images:
            size = config.images * config.sample_kb * 1e3
            passes = "" if self.steps is None else f", {self.steps * self.images / config.images:,.2g} times"
            lines.append(
                f"Data: {config.images:,.0f} images{passes}; {size / 1e9:,.1f} GB in {self.shards:,} shards of "
                f"{config.images / self.shards:,.0f} images."
            )
        rate = self.images_per_second
        lines.append(
            f"Workers: {self.workers} a GPU, each with a core of its own, for up to {rate / config.gpus:,.0f} images a "
            f"second: {(1 + self.workers) * min(config.gpus, config.gpus_per_node)} cores a machine, "
            f"{rate * config.sample_kb / 1e3:,.1f} MB/s in all."
        )
        size, count = self.checkpoint_bytes, self.checkpoints
        kept = "" if count is None else f"; {count:,} of them, as set, {count * size / 1e9:,.1f} GB"
        lines.append(f"Disk: {size / 1e9:,.2f} GB a checkpoint (weights, averages, optimizer){kept}.")
        return "\n".join(lines)

    def _assumed(self) -> str:
        config, kind, calibrated = self.config, self.config.kind, self.step.calibrated
        if calibrated:
            speed = f"the {calibrated / 1e9:,.1f} GFLOP/s that ten steps reached on this machine"
        else:
            (low, high), (quick, slow) = config.utilization, config.launch_time
            speed = (
                f"{low:.0%} to {high:.0%} of {kind.peak / 1e12:g} TFLOP/s (--utilization), at least {quick:g} to "
                f"{slow:g} µs for each operation (--launch_time)"
            )
        return (
            f"Assumed: {speed}; {config.reserve:.0%} of the memory for CUDA, its libraries and "
            f"fragmentation (--reserve); {kind.within / 1e9:g} GB/s to GPUs of the same machine, "
            f"{config.network_speed:g} GB/s to others (--network_speed), at best hidden behind computation and at "
            f"worst not at all; {config.watts[0]:,.0f} to {config.watts[1]:,.0f} W a GPU with its machine and cooling "
            f"(--power); ${config.dollars[0]:g} to ${config.dollars[1]:g} for a GPU's hour (--price); "
            f"{config.sample_kb:g} KB an image (--sample_kb), {config.decode_rate:g} images a second and worker "
            "(--decode_rate). Not counted: waiting for data, evaluations, previews, restarts, storage of the data, and "
            "the passes of frozen networks and discriminators."
        )


def _steps(recipe: Recipe, step: Step) -> int | None:
    """The number of steps of a whole run."""
    training, gpus = recipe.training, step.config.gpus
    if step.batch == training.batch_size:
        return training.last_step(gpus)
    by_samples = -(-training.samples // (step.batch * gpus))
    return min((steps for steps in (training.iterations, by_samples) if steps), default=None)
