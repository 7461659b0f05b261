"""What ``info.py`` prints: the content of a checkpoint file, the cost of a network, without allocating it, or the plan
of a training run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from ..checkpoints.checkpoint import ROLES, load_file
from ..checkpoints.kinds import TRAINING_COMMANDS
from ..checkpoints.lora_file import ENDING, Lora, lora_at
from ..config import InputError, entries, option, quantity, section, setting_changes, settings, shown, to_dict
from ..config.bounds import MAX_PROCESSES
from ..evaluation.report import Part, Table, rendered
from ..recipes.planning.cluster import PlanConfig
from ..recipes.planning.cost import IMAGES, NetworkCost, networks_of, networks_of_file
from ..recipes.planning.plan import Plan
from ..recipes.planning.step import process_memory
from ..recipes.recipe import Recipe
from .command_line import parse_kind
from .merge_lora import merged_loras
from .sources import presets_of

MICROBATCHES = (1, 4, 16, 64)
FULL_SIZE = ("generator_64", "upsampler_256", "upsampler_1024", "classifier_64")  # presets that make a cascade
ENDINGS = ("", "_small", "_tiny")  # of their names and of those of the smaller cascades
PLAN = """Plan a training run on given GPUs: parallelism, micro-batch, memory, time, energy, cost, data and disk. All is
computed; --calibrate measures the speed."""


@settings
class InfoConfig:
    """What to describe"""

    model_path: str = option("", "checkpoint file; empty = the network that the other settings describe")
    processes: int = option(
        1, "number of processes, for memory per process under --parallel", least=1, most=MAX_PROCESSES
    )


@functools.cache
def _with(name: str, config: type, run_class: type) -> Any:
    fields = [(name, config, section(config))]
    return dataclasses.make_dataclass(f"{run_class.__name__}Info", fields, bases=(run_class,), frozen=True)


def _configs_with(name: str, config: type) -> dict[str, Any]:
    """The configs of training commands by kind, with one more section. Adapters are not among them: their checkpoints
    can be described, but not their settings alone."""
    commands = {kind: command for kind, command in TRAINING_COMMANDS.items() if not command.over_base}
    return {kind: _with(name, config, command.config_class) for kind, command in commands.items()}


def parse_info(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as the config of the kind that ``--kind``, the preset or the config file says, by default the
    first of ``TRAINING_COMMANDS``, with an ``InfoConfig`` as its section ``what``."""
    return parse_kind(_configs_with("what", InfoConfig), argv, description)


def parse_plan(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as ``parse_info`` reads it, with a ``PlanConfig`` as its section ``plan``."""
    return parse_kind(_configs_with("plan", PlanConfig), argv, description, "plan")


def plan(run: Any) -> str:
    """The text that ``info.py plan`` prints for the config of ``parse_plan``."""
    return str(Plan.of(run))


def cost_parts(network: NetworkCost) -> Iterator[Part]:
    """What ``info.py`` says about a network: its size, and its memory without and with activation checkpointing."""
    yield (
        f"{network.parameters:,} parameters; {network.flops(network.size) / 1e9:,.1f} GFLOPs for a forward pass over "
        f"one image of {network.size}×{network.size} pixels.\n"
        f"Memory for training in fp32 on images of {network.trained}×{network.trained} pixels: the peak activations of "
        "one micro-batch, and the total with weights, gradients, AdamW's moments and one set of EMA weights. In "
        "bf16 these stay in fp32, with copies of the weights, and so do norms."
    )
    halves, rows = [network.half_cost(on) for on in (False, True)], []
    for n in MICROBATCHES:
        sizes = [n * network.activation_bytes(on) for on in (False, True)]
        sizes += [network.training_bytes(n, on, emas=1) for on in (False, True)]
        sizes += [network.training_bytes(0, emas=1) + half.copy_bytes + n * half.activation_bytes for half in halves]
        rows.append([n, *(f"{size / 2**30:,.2f}" for size in sizes)])
    header = ["microbatch"]
    for name in ("activations, GiB", "total, GiB", "total in bf16, GiB"):
        header += [name, f"with {network.probe.checkpoint_flag}"]
    yield Table(header, rows)


def describe(run: Any) -> str:
    """The text that ``info.py`` prints for the config of ``parse_info``. Raises InputError for a file that is no
    checkpoint, and for settings beside one, whose own they cannot change."""
    what: InfoConfig = run.what
    if what.model_path:
        usual = to_dict(type(run)(what=what))
        if changed := [each.name for each in setting_changes(usual, to_dict(run), type(run))]:
            raise InputError(f"--model_path {what.model_path} says all settings itself: leave out {', '.join(changed)}")
        return describe_file(what.model_path)
    recipe, parts = run.recipe(what.processes), list[Part]()
    networks = networks_of(recipe)
    for network in networks:
        total = f"{network.training_bytes(recipe.microbatch) / 2**30:,.2f} GiB"
        parts += [f"{network.trainee}:"] if len(networks) > 1 else []
        parts += cost_parts(network)
        flag, is_set = network.probe.checkpoint_flag, network.probe.checkpointed
        parts.append(f"With {flag} {is_set} and microbatch {recipe.microbatch}, as set: {total}.")
        if what.processes > 1:
            parts.append(_per_process(recipe, network, what.processes))
    return rendered(parts)


def _per_process(recipe: Recipe, network: NetworkCost, processes: int) -> str:
    mode = recipe.training.sharding.parallel
    if mode == "ddp":
        return f"Each of {processes} processes needs as much, since each has all weights (--parallel ddp)."
    found = process_memory(recipe, network, processes)
    held, gathered, activation, total = (
        f"{size / 2**30:,.2f} GiB" for size in (found.held, found.gathered, found.activation, found.total)
    )
    return (
        f"On each of {processes} processes (--parallel {mode}): {total}: {held} for its share of weights, "
        f"gradients, optimizer state and averages, {gathered} for what is gathered, {activation} for activations."
    )


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
    networks = networks_of_file(content)
    settings: Any = networks[0].settings
    trainee = f" (trainee {content['trainee']})" if content["trainee"] else ""
    lines = [
        f"{path} holds {ROLES[content['role']]} of a {settings.name}{trainee} after {content['step']:,} steps and "
        f"{content['samples']:,} samples; tokenizer {content['tokenizer'] or 'none'}."
    ]
    lines += settings.summary([network.trainee for network in networks])
    if merged := [f"{each['file']}:{each['factor']:g}" for each in merged_loras(content["config"])]:
        lines.append(f"It has LoRAs in its weights: {', '.join(merged)}.")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        listed = ", ".join(f"{name} {shown(value)}" for name, _, value in entries(type(value), to_dict(value)))
        lines.append(f"{field.name}: {listed}")
    if content["role"] == "optimizer":
        resumes = "It resumes training and holds no weights: those are in model….pt and ema_….pt of the same step."
        return rendered(["\n".join(lines), resumes])
    parts: list[Part] = ["\n".join(lines)]
    for network in networks:
        (text, table), title = cost_parts(network), f"{network.trainee}:\n" if len(networks) > 1 else ""
        parts += [f"{title}{text}", table]
    return rendered(parts)


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


@functools.cache
def preset_networks(name: str) -> tuple[Recipe, list[NetworkCost]]:
    """The run that a preset describes, and its networks."""
    recipe = parse_info(["--preset", name]).recipe()
    return recipe, networks_of(recipe)


def whole_presets() -> list[str]:
    """Presets of networks that need no base."""
    kinds = [kind for kind, command in TRAINING_COMMANDS.items() if not command.over_base]
    return sorted(name for kind in kinds for name in presets_of(kind))


def preset_table() -> str:
    """The costs of all presets but those of adapters in Markdown: cascades first, then the others by name."""
    cascades = [name + ending for ending in ENDINGS for name in FULL_SIZE]
    others = [name for name in whole_presets() if name not in cascades]
    rows = [row for name in [*cascades, *others] for row in preset_rows(name)]
    header = ["preset", "kind", "pixels", "parameters, M", "GFLOPs"]
    header += ["MiB per image", "with `use_checkpoint`", "microbatch", "GB total"]
    total = sum(network.parameters for name in FULL_SIZE for network in preset_networks(name)[1])
    return (
        f"{Table(header, rows)}\n\n"
        f"{' + '.join(f'`{name}`' for name in FULL_SIZE)} = {total / 1e6:,.0f} M parameters.\n\n"
        "*Parameters*: with the built-in vocabulary; bundled models have smaller ones. *GFLOPs*: forward pass\n"
        "over one image. *MiB per image*: activation memory in training per image (with `crop_size`: per crop) of\n"
        f"a micro-batch of {IMAGES}, without and with activation checkpointing. *GB total*: memory for training\n"
        "with the preset's own microbatch. All in fp32.\n"
    )


def preset_rows(name: str) -> list[list[Any]]:
    """Rows of ``preset_table``: one for each network of a preset."""
    recipe, networks = preset_networks(name)
    kind, rows = recipe.settings.kind, []
    for network in networks:
        what = f"{kind}, {network.trainee}" if len(networks) > 1 else kind
        size = f"{network.parameters / 1e6:,.1f}", f"{network.flops(network.size) / 1e9:,.1f}"
        activations = [f"{network.activation_bytes(on) / 2**20:,.0f}" for on in (False, True)]
        total = f"{network.training_bytes(recipe.microbatch) / 1e9:,.1f}"
        rows.append([f"`{name}`", what, network.size, *size, *activations, recipe.microbatch, total])
    return rows
