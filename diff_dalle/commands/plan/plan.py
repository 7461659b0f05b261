"""The plan of a training run as a text, and the command line that asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config import leaves
from ...data.order import streams_for
from ...evaluation.report import markdown_table
from ..command_line import parse_kind
from ..info import configs_with
from ..training import TrainingRun
from .calibration import reached
from .choice import Option, chosen, options, step_flops
from .config import PlanConfig
from .network import PlannedNetwork, networks_of

PLAN = """Plan a training run on given GPUs: parallelism, micro-batch, memory, time, energy, cost, data and disk. All is
computed; --calibrate measures the speed."""


def parse_plan(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as ``parse_info`` reads it, with a ``PlanConfig`` as its section ``plan``."""
    return parse_kind(configs_with("plan", PlanConfig), argv, description, "plan")


@dataclass(frozen=True)
class Plan:
    """What a run takes. Pairs are the lowest and the highest of what is assumed.

    batch: images a GPU and step. steps: of the whole run, None = hours alone limit it.
    """

    run: TrainingRun
    config: PlanConfig
    networks: list[PlannedNetwork]
    batch: int
    steps: int | None
    found: list[Option]
    best: Option
    calibrated: float | None

    @staticmethod
    def of(run: Any) -> Plan:
        """InputError where nothing fits, and for settings that contradict each other."""
        config: PlanConfig = run.plan
        calibrated = reached(run) if config.calibrate else None
        run = run.on(config.gpus)
        batch = config.global_batch // config.gpus or run.training.batch_size
        half = run.training.precision != "fp32"
        networks = networks_of(run, half)
        found = options(networks, config, batch, _caches(run), calibrated)
        best = chosen(found, batch)
        return Plan(run, config, networks, batch, _steps(run, config, batch), found, best, calibrated)

    @property
    def images(self) -> int:
        """Per step of all GPUs together."""
        return self.batch * self.config.gpus

    @property
    def flops(self) -> int:
        """Per step of all GPUs together."""
        best, gpus = self.best, self.config.gpus
        return gpus * step_flops(self.networks, best.layout.checkpoint, self.batch, best.microbatch, _caches(self.run))

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
            4 * each.parameters * (1 + len(each.optim.ema_rate)) + each.optimizer_bytes for each in self.networks
        )

    @property
    def checkpoints(self) -> int | None:
        """The number of checkpoints that stay; None = not known without a number of steps."""
        training, steps = self.run.training, self.steps
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
        parts = [self._head(), self._options(), self._choice(), self._memory(), self._times(), self._data()]
        return "\n\n".join([*parts, self._assumed()])

    def _head(self) -> str:
        config, names = self.config, ", ".join(each.trainee for each in self.networks if each.trainee)
        parameters = sum(each.parameters for each in self.networks) / 1e6
        memory = config.gpu_memory or config.kind.memory
        what = f"{self.run.kind} ({names})" if names else f"{self.run.kind}"
        return (
            f"A {what} of {parameters:,.1f} M parameters on {config.gpus} × {config.gpu} ({memory:g} GiB, of which "
            f"{config.usable / 2**30:,.1f} for tensors), {self.batch} images a GPU and step, {self.images:,} in all."
        )

    def _options(self) -> str:
        rows = []
        for each in self.found:
            layout = each.layout
            times = [f"{seconds:.3g}" for seconds in each.seconds]
            fitting = each.microbatch if each.fits else "does not fit"
            mark = "←" if each is self.best else ""
            rows.append([layout.parallel, layout.checkpoint, fitting, self._size(each.memory.total), *times, mark])
        flag = self.networks[0].probe.checkpoint_flag
        header = [
            "parallel",
            flag,
            "largest micro-batch",
            f"{self._unit} a GPU",
            "s a step, at least",
            "at most",
            "chosen",
        ]
        return markdown_table(header, rows)

    def _choice(self) -> str:
        layout, known = self.best.layout, {leaf.name for leaf in leaves(type(self.run)) if leaf.has_flag}
        settings: dict[str, object] = {"parallel": layout.parallel} if self.config.gpus > 1 else {}
        settings[self.networks[0].probe.checkpoint_flag] = layout.checkpoint
        settings |= {"batch_size": self.batch, "microbatch": self.best.microbatch, "num_workers": self.workers}
        flags = [f"--{name} {value}" for name, value in settings.items() if name in known]
        others = [f"{name} {value}" for name, value in settings.items() if name not in known]
        in_file = [f"a GPU, in the file's own terms: {', '.join(others)}"] if others else []
        return f"Settings: {'; '.join([*([' '.join(flags)] if flags else []), *in_file])}"

    def _memory(self) -> str:
        memory = self.best.memory
        parts = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}
        rows = [[name, self._size(size)] for name, size in {**parts, "all": memory.total}.items() if size]
        return markdown_table(["memory a GPU", self._unit], rows)

    @property
    def _unit(self) -> str:
        return "GiB" if self.best.memory.total >= 2**30 else "MiB"

    def _size(self, size: int) -> str:
        return f"{size / (2**30 if self._unit == 'GiB' else 2**20):,.2f}"

    def _times(self) -> str:
        per_step, per_image = self.flops, self.flops / self.images
        lines = [f"{per_image / 1e9:,.1f} GFLOPs an image, forward and backward; {per_step / 1e12:,.1f} TFLOPs a step."]
        steps = self.steps
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
        return "\n".join(lines) + "\n\n" + markdown_table(["", "lowest", "highest"], rows)

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
            f"Workers: {self.workers} a GPU for up to {rate / config.gpus:,.0f} images a second, "
            f"{rate * config.sample_kb / 1e3:,.1f} MB/s in all."
        )
        size, count = self.checkpoint_bytes, self.checkpoints
        kept = "" if count is None else f"; {count:,} of them, as set, {count * size / 1e9:,.1f} GB"
        lines.append(f"Disk: {size / 1e9:,.2f} GB a checkpoint (weights, averages, optimizer){kept}.")
        return "\n".join(lines)

    def _assumed(self) -> str:
        config, kind = self.config, self.config.kind
        if self.calibrated:
            speed = f"the {self.calibrated / 1e9:,.1f} GFLOP/s that ten steps reached on this machine"
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


def _caches(run: TrainingRun) -> bool:
    """Whether several micro-batches need one more forward pass: for a contrastive loss over the whole batch."""
    return run.kind == "classifier"


def _steps(run: TrainingRun, config: PlanConfig, batch: int) -> int | None:
    """The number of steps, each over ``batch`` images a GPU."""
    training = run.training
    if batch == training.batch_size:
        return training.last_step(config.gpus)
    by_samples = -(-training.samples // (batch * config.gpus))
    return min((steps for steps in (training.iterations, by_samples) if steps), default=None)


def plan(run: Any) -> str:
    """The text that ``info.py plan`` prints for the config of ``parse_plan``."""
    return str(Plan.of(run))
