"""What ``info.py`` prints: the content of a checkpoint file, or the cost of a network, without allocating it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..checkpoints.checkpoint import ROLES, load_file
from ..checkpoints.kind import NetworkKind
from ..checkpoints.kinds import find_kind
from ..checkpoints.lora_file import ENDING, Lora, lora_at
from ..config import entries, option, section, settings, shown, to_dict
from ..distributed.devices import without_values
from ..distributed.world import ProcessInfo, World
from ..errors import InputError, quantity
from ..evaluation.report import markdown_table
from ..models.cost import Cost, HalfCost, measure, measure_half, peak_bytes
from ..models.layers import to_channels_last
from ..models.sharded_cost import Shapes, ShardedCost, shapes_of, sharded_cost
from .command_line import parse_kind
from .merge_lora import merged_loras
from .sources import preset_names, presets_of
from .training import TrainingRun
from .training_commands import TRAINING_COMMANDS

MICROBATCHES = (1, 4, 16, 64)
IMAGES = 64  # measured together: some memory of a backward pass does not grow with the number of images
FULL_SIZE = ("generator_64", "upsampler_256", "upsampler_1024", "classifier_64")  # presets that make a cascade
ENDINGS = ("", "_small", "_tiny")  # of their names and of those of the smaller cascades


@settings
class InfoConfig:
    """What to describe"""

    model_path: str = option("", "checkpoint file; empty = the network that the other settings describe")
    processes: int = option(1, "number of processes, for the memory of each under --parallel", least=1)


@functools.cache
def _with(name: str, config: type, run_class: type[TrainingRun]) -> Any:
    fields = [(name, config, section(config))]
    return dataclasses.make_dataclass(f"{run_class.__name__}Info", fields, bases=(run_class,), frozen=True)


def configs_with(name: str, config: type) -> dict[str, Any]:
    """The configs of training commands by kind, with one more section. Adapters are not among them: their checkpoints
    can be described, but not their settings alone."""
    commands = {kind: command for kind, command in TRAINING_COMMANDS.items() if not command.over_base}
    return {kind: _with(name, config, command.config_class) for kind, command in commands.items()}


def parse_info(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as the config of the kind that ``--kind``, the preset or the config file says, by default the
    first of ``TRAINING_COMMANDS``, with an ``InfoConfig`` as its section ``what``."""
    return parse_kind(configs_with("what", InfoConfig), argv, description)


@dataclass(frozen=True)
class NetworkCost:
    """The cost of a network without and with activation checkpointing.

    size:    width and height in pixels of whole images, on which FLOPs are counted.
    trained: width and height in pixels of the images or crops it is trained on, for the activations.
    flag:    the setting that turns activation checkpointing on; is_set: its value.
    shapes:  of its parameters, see ``shapes_of``.
    half:    (whether with activation checkpointing) → memory in bf16.
    """

    plain: Cost
    checkpointed: Cost
    size: int
    trained: int
    flag: str
    is_set: bool
    shapes: Sequence[Shapes]
    half: Callable[[bool], HalfCost]

    @property
    def own(self) -> Cost:
        """The cost with the flag as it is set."""
        return self.checkpointed if self.is_set else self.plain

    def __str__(self) -> str:
        rows, costs, halves = [], (self.plain, self.checkpointed), [self.half(on) for on in (False, True)]
        for n in MICROBATCHES:
            sizes = [n * cost.activation_bytes for cost in costs] + [cost.training_bytes(n) for cost in costs]
            sizes += [self.plain.training_bytes(0) + h.copy_bytes + n * h.activation_bytes for h in halves]
            rows.append([n, *(f"{size / 2**30:,.2f}" for size in sizes)])
        header = ["microbatch"]
        for name in ("activations, GiB", "total, GiB", "total in bf16, GiB"):
            header += [name, f"with {self.flag}"]
        return (
            f"{self.plain.parameters:,} parameters; {self.plain.flops / 1e9:,.1f} GFLOPs for a forward pass over one "
            f"image of {self.size}×{self.size} pixels.\n"
            f"Memory for training in fp32 on images of {self.trained}×{self.trained} pixels: the peak activations of "
            "one micro-batch, and the total with weights, gradients, AdamW's moments and one set of EMA weights. In "
            f"bf16 these stay in fp32, with copies of the weights, and so do norms.\n\n{markdown_table(header, rows)}"
        )


def describe(run: Any) -> str:
    """The text that ``info.py`` prints for the config of ``parse_info``. Raises InputError for a file that is no
    checkpoint, and for settings beside one, whose own they cannot change."""
    what: InfoConfig = run.what
    if what.model_path:
        given, usual = (list(entries(type(run), to_dict(each))) for each in (run, type(run)(what=what)))
        if changed := [name for name, free, value in given if (name, free, value) not in usual]:
            raise InputError(f"--model_path {what.model_path} says all settings itself: leave out {', '.join(changed)}")
        return describe_file(what.model_path)
    run = run.on(what.processes)
    costs, texts = run_costs(run), []
    for i, (name, cost) in enumerate(costs.items()):
        total = f"{training_bytes(run, cost, i) / 2**30:,.2f} GiB"
        texts += [f"{name}:"] if len(costs) > 1 else []
        texts += [str(cost), f"With {cost.flag} {cost.is_set} and microbatch {microbatch(run)}, as set: {total}."]
        if what.processes > 1:
            texts.append(_per_process(run, cost, i))
    return "\n\n".join(texts)


def _per_process(run: Any, cost: NetworkCost, i: int) -> str:
    config, processes = run.training.sharding, run.what.processes
    if config.parallel == "ddp":
        return f"Each of {processes} processes needs as much, since each has all weights (--parallel ddp)."
    found = process_cost(run, cost, processes, i)
    held, gathered, activation, total = (
        f"{size / 2**30:,.2f} GiB" for size in (found.held, found.gathered, found.activation, found.total)
    )
    return (
        f"On each of {processes} processes (--parallel {config.parallel}): {total}: {held} for its share of weights, "
        f"gradients, optimizer state and averages, {gathered} for what is gathered, {activation} for activations."
    )


def process_cost(run: TrainingRun, cost: NetworkCost, processes: int, i: int = 0) -> ShardedCost:
    """The memory on each process for training a run's network, its ``i``-th, with its own settings. InputError when it
    cannot be sharded over so many."""
    config, piece = run.training.sharding, microbatch(run)
    if not cost.shapes:
        raise InputError(f"the weights of a {run.kind} cannot be sharded: set --parallel ddp")
    sharing = len(config.groups(World(ProcessInfo("single", 0, processes), torch.device("meta")))[0])
    pieces, emas = -(-run.training.batch_size // piece), len(run.optims[i].ema_rate)
    return sharded_cost(cost.shapes, cost.own, config, sharing, piece, pieces, emas)


def describe_file(path: str) -> str:
    """Role, age and settings of a checkpoint file, and the cost of its network; or what a LoRA says about itself."""
    if lora := lora_at(path):
        return describe_lora(lora)
    content = load_file(path, roles=tuple(ROLES))
    if content["kind"].endswith(ENDING):
        return (
            f"{path} holds {ROLES[content['role']]} of the training of a LoRA after {content['step']:,} steps: it "
            "resumes that; the LoRA is in lora….safetensors of the same step."
        )
    settings: Any = find_kind(content["kind"]).read(content["config"])
    trainee = f" (trainee {content['trainee']})" if content["trainee"] else ""
    lines = [
        f"{path} holds {ROLES[content['role']]} of a {settings.name}{trainee} after {content['step']:,} steps and "
        f"{content['samples']:,} samples; tokenizer {content['tokenizer'] or 'none'}."
    ]
    names = (content["trainee"],) if content["trainee"] else settings.trainees
    lines += settings.summary(names)
    if merged := [f"{each['file']}:{each['factor']:g}" for each in merged_loras(content["config"])]:
        lines.append(f"It has LoRAs in its weights: {', '.join(merged)}.")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        listed = ", ".join(f"{name} {shown(value)}" for name, _, value in entries(type(value), to_dict(value)))
        lines.append(f"{field.name}: {listed}")
    if content["role"] == "optimizer":
        lines += ["", "It resumes training and holds no weights: those are in model….pt and ema_….pt of the same step."]
    else:
        for name in names:
            title = [f"{name}:"] if len(names) > 1 else []
            lines += ["", *title, str(network_cost(settings, vocabulary_size(content["state"]), name))]
    return "\n".join(lines)


def vocabulary_size(state: Mapping) -> int:
    """By the weights of a network: the tokenizer's file is not needed. 0 = it reads no text."""
    return next((len(value) for name, value in state.items() if name.endswith("token_emb.weight")), 0)


def describe_lora(lora: Lora) -> str:
    """What a LoRA changes, as it says itself."""
    about = lora.about
    modules, count = {name.rpartition(".")[0] for name in lora.pairs}, sum(t.numel() for t in lora.tensors.values())
    of = f"{about.kind} {about.trainee}" if about.trainee else about.kind
    whose = f", of the CLIP {about.clip}" if about.clip else ""
    return "\n".join(
        [
            f"{lora.path} holds a LoRA, which --lora takes, of {quantity(len(modules), 'module')} with "
            f"{quantity(count, 'parameter')}, for a {of} with the weights {about.base}.",
            f"rank {about.rank}, alpha {about.alpha:g}, module_filters {shown(about.module_filters)}",
            f"train_tokens: {shown(about.train_tokens)}{whose}",
        ]
    )


def run_costs(run: TrainingRun) -> dict[str, NetworkCost]:
    """The costs of the networks of a run by their names, one with an empty name where it has only one."""
    tokenizer, settings = run.build_tokenizer(), find_kind(run.kind).of_run(run)
    vocab_size = tokenizer.vocab_size if tokenizer else 0
    return {name: network_cost(settings, vocab_size, name) for name in settings.trainees}


def microbatch(run: TrainingRun) -> int:
    """Images per forward pass of a run's network."""
    return run.training.microbatch or run.training.batch_size


def training_bytes(run: TrainingRun, cost: NetworkCost, i: int = 0) -> int:
    """Memory for training a run's network, its ``i``-th, in fp32 with its own settings."""
    return cost.own.training_bytes(microbatch(run), emas=len(run.optims[i].ema_rate))


def network_cost(settings: NetworkKind, vocab_size: int, trainee: str = "") -> NetworkCost:
    """The cost of a kind's network with these settings, measured on the meta device. trainee: which of several."""
    probe = settings.probe(trainee)
    size, trained = probe.sizes

    def forward(pixels: int) -> Callable[[nn.Module], torch.Tensor]:
        return lambda network: probe.forward(network, IMAGES, pixels)

    @functools.cache
    def half(on: bool) -> HalfCost:
        def build() -> nn.Module:
            return probe.with_checkpoint(on).build(vocab_size, trainee)

        return measure_half(build, lambda network, images: probe.forward(network, images, trained), IMAGES)

    with without_values():
        networks = [to_channels_last(probe.with_checkpoint(on).build(vocab_size, trainee)) for on in (False, True)]
        plain = measure(networks[0], forward(size), forward(trained), IMAGES)
        # FLOPs stay those of a forward pass: recomputation does not count.
        checkpointed = replace(plain, activation_bytes=peak_bytes(networks[1], forward(trained)) // IMAGES)
        shapes = shapes_of(networks[0])
    return NetworkCost(plain, checkpointed, size, trained, probe.checkpoint_flag, probe.checkpointed, shapes, half)


@functools.cache
def preset_costs(name: str) -> tuple[TrainingRun, dict[str, NetworkCost]]:
    """The run that a preset describes, and its networks' costs by name."""
    run = parse_info(["--preset", name])
    return run, run_costs(run)


def preset_cost(name: str) -> tuple[TrainingRun, NetworkCost]:
    """``preset_costs`` of a preset with a single network."""
    run, costs = preset_costs(name)
    (cost,) = costs.values()
    return run, cost


def family(ending: str = "") -> list[str]:
    """Presets that make a cascade, from the base generator to the classifier; ending: "", "_small" or "_tiny"."""
    return [name + ending for name in FULL_SIZE if name + ending in preset_names()]


def whole_presets() -> list[str]:
    """Presets of networks that need no base."""
    kinds = [kind for kind, command in TRAINING_COMMANDS.items() if not command.over_base]
    return sorted(name for kind in kinds for name in presets_of(kind))


def preset_table() -> str:
    """The costs of all presets but those of adapters in Markdown: cascades first, then the others by name."""
    cascades = [name for ending in ENDINGS for name in family(ending)]
    others = [name for name in whole_presets() if name not in cascades]
    rows = [row for name in [*cascades, *others] for row in preset_rows(name)]
    header = ["preset", "kind", "pixels", "parameters, M", "GFLOPs"]
    header += ["MiB per image", "with `use_checkpoint`", "microbatch", "GB total"]
    total = sum(preset_cost(name)[1].plain.parameters for name in FULL_SIZE)
    return (
        f"{markdown_table(header, rows)}\n\n"
        f"{' + '.join(f'`{name}`' for name in FULL_SIZE)} = {total / 1e6:,.0f} M parameters.\n\n"
        "*GFLOPs*: forward pass over one image. *MiB per image*: activation memory in training per image (with\n"
        f"`crop_size`: per crop) of a micro-batch of {IMAGES}, without and with activation checkpointing. *GB total*:\n"
        "memory for training with the preset's own microbatch. All in fp32.\n"
    )


def preset_rows(name: str) -> list[list[Any]]:
    """Rows of ``preset_table``: one for each network of a preset."""
    run, costs = preset_costs(name)
    rows = []
    for i, (network, cost) in enumerate(costs.items()):
        activations = [f"{one.activation_bytes / 2**20:,.0f}" for one in (cost.plain, cost.checkpointed)]
        totals = [microbatch(run), f"{training_bytes(run, cost, i) / 1e9:,.1f}"]
        size = f"{cost.plain.parameters / 1e6:,.1f}", f"{cost.plain.flops / 1e9:,.1f}"
        kind = f"{run.kind}, {network}" if len(costs) > 1 else run.kind
        rows.append([f"`{name}`", kind, cost.size, *size, *activations, *totals])
    return rows
