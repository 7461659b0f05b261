"""What ``info.py`` says: what is in a checkpoint file, and what a network costs, without allocating it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..checkpoints.checkpoint import ROLES, load_file
from ..checkpoints.kinds import Kind, find_kind
from ..config import option, section
from ..errors import InputError
from ..evaluation.report import markdown_table
from ..models.cost import Cost, measure, peak_bytes
from ..models.layers import to_channels_last
from .command_line import parse, preset_names
from .train_classifier import ClassifierRun
from .train_generator import GeneratorRun
from .training import TrainingRun

MICROBATCHES = (1, 4, 16, 64)
IMAGES = 4  # that are measured together: what a backward pass needs beside its activations is not needed for each
FULL_SIZE = ("generator_64", "upsampler_256", "upsampler_1024", "classifier_64")  # presets that are used together
ENDINGS = ("", "_small", "_tiny")  # of theirs and their siblings' names


@dataclass(frozen=True)
class InfoConfig:
    """What to describe"""

    model_path: str = option("", "checkpoint file; empty = the network that the other settings describe")


@dataclass(frozen=True)
class GeneratorInfo(GeneratorRun):
    """The settings of a generator's run, and a checkpoint to look at instead."""

    what: InfoConfig = section(InfoConfig)


@dataclass(frozen=True)
class ClassifierInfo(ClassifierRun):
    """The same for a classifier's run."""

    what: InfoConfig = section(InfoConfig)


def parse_any(description: str, argv: Sequence[str] | None = None) -> GeneratorInfo | ClassifierInfo:
    """The command line as the settings of a generator or, where these do not fit, of a classifier."""
    try:
        return parse(GeneratorInfo, argv, description)
    except InputError as error:
        try:
            return parse(ClassifierInfo, argv, description)
        except InputError:
            raise error from None


@dataclass(frozen=True)
class NetworkCost:
    """What a network costs when it keeps its activations, and when it computes them again.

    size:    side in pixels of whole images, of which the FLOPs are.
    trained: side of what is trained on, of which the activations are.
    flag:    the setting that decides between the two, and is_set: what it is.
    """

    plain: Cost
    checkpointed: Cost
    size: int
    trained: int
    flag: str
    is_set: bool

    @property
    def own(self) -> Cost:
        """With the flag as it is set."""
        return self.checkpointed if self.is_set else self.plain

    def __str__(self) -> str:
        rows, costs = [], (self.plain, self.checkpointed)
        for n in MICROBATCHES:
            sizes = [n * each.activation_bytes for each in costs] + [each.training_bytes(n) for each in costs]
            rows.append([n, *(f"{size / 2**30:,.2f}" for size in sizes)])
        header = ["microbatch", "activations, GiB", f"with {self.flag}", "in all, GiB", f"with {self.flag}"]
        return (
            f"{self.plain.parameters:,} parameters; {self.plain.flops / 1e9:,.1f} GFLOPs for a pass over one image of "
            f"{self.size}×{self.size} pixels.\n"
            f"Memory to train in fp32 on images of {self.trained}×{self.trained} pixels: a micro-batch's activations "
            "at the worst moment, and these with weights, gradients, AdamW's moments and one average. Half precision "
            f"saves little of it, since norms stay in fp32.\n\n{markdown_table(header, rows)}"
        )


def describe(run: GeneratorInfo | ClassifierInfo) -> str:
    """The text that ``info.py`` prints. InputError for a file that is no checkpoint."""
    if run.what.model_path:
        return describe_file(run.what.model_path)
    cost = run_cost(run)
    return (f"{cost}\n\nAs set, with {cost.flag} {cost.is_set} and a microbatch of {microbatch(run)}: "
            f"{training_bytes(run, cost) / 2**30:,.2f} GiB.")  # fmt: skip


def describe_file(path: str) -> str:
    """Role, age and settings of a checkpoint file, and its network's cost."""
    content = load_file(path, roles=tuple(ROLES))
    lines = [f"{path} holds {ROLES[content['role']]} of a {content['kind']} after {content['step']:,} steps and "
             f"{content['samples']:,} samples; tokenizer {content['tokenizer'] or 'none'}."]  # fmt: skip
    for name in ("model", "diffusion", "augmentation", "contrastive", "tokenizer"):
        if name in content["config"]:
            settings = ", ".join(f"{key} {value}" for key, value in _flat(content["config"][name]))
            lines.append(f"{name}: {settings}")
    if content["role"] != "optimizer":
        lines += ["", str(_file_cost(content))]
    return "\n".join(lines)


def _flat(settings: dict):
    for key, value in settings.items():
        yield from _flat(value) if isinstance(value, dict) else [(key, value)]


def _file_cost(content: Mapping) -> NetworkCost:
    """The cost of the network whose weights a checkpoint holds."""
    kind = find_kind(content["kind"])
    vocab_size = next((len(value) for name, value in content["state"].items() if name.endswith("token_emb.weight")), 0)
    return network_cost(kind, kind.read_settings(content["config"]), vocab_size)


def run_cost(run: TrainingRun) -> NetworkCost:
    """The cost of the network that a run trains."""
    tokenizer, kind = run.build_tokenizer(), find_kind(run.kind)
    return network_cost(kind, kind.settings_of(run), tokenizer.vocab_size if tokenizer else 0)


def microbatch(run: TrainingRun) -> int:
    """Images that go through a run's network at once."""
    return run.training.microbatch or run.training.batch_size


def training_bytes(run: TrainingRun, cost: NetworkCost) -> int:
    """Memory to train a run's network in fp32, with its own settings."""
    return cost.own.training_bytes(microbatch(run), averages=len(run.optim.ema_rate))


def network_cost(kind: Kind, settings, vocab_size: int) -> NetworkCost:
    """The cost of a kind's network with these settings, found on the meta device."""
    probe = kind.probe(settings)
    size, trained = probe.sizes

    def call(side: int) -> Callable[[nn.Module], torch.Tensor]:
        return lambda network: probe.forward(network, IMAGES, side)

    with torch.device("meta"):
        networks = [to_channels_last(kind.build(probe.with_checkpoint(value), vocab_size)) for value in (False, True)]
        plain = measure(networks[0], call(size), call(trained), IMAGES)
        # The FLOPs do not count what is computed again.
        checkpointed = replace(plain, activation_bytes=peak_bytes(networks[1], call(trained)) // IMAGES)
    return NetworkCost(plain, checkpointed, size, trained, probe.checkpoint_flag, probe.checkpointed)


@functools.cache
def preset_cost(name: str) -> tuple[GeneratorInfo | ClassifierInfo, NetworkCost]:
    """The run that a preset describes, and its network's cost."""
    run = parse_any("", ["--preset", name])
    return run, run_cost(run)


def family(ending: str = "") -> list[str]:
    """Presets that make a cascade, from the base generator to the classifier; ending: "", "_small" or "_tiny"."""
    return [name + ending for name in FULL_SIZE if name + ending in preset_names()]


def preset_table() -> str:
    """What the networks of the presets cost, in Markdown, for the README."""
    rows = []
    for name in itertools.chain.from_iterable(map(family, ENDINGS)):
        run, cost = preset_cost(name)
        rows.append([
            f"`{name}`", f"{cost.plain.parameters / 1e6:,.1f}", f"{cost.plain.flops / 1e9:,.1f}",
            *(f"{each.activation_bytes / 2**20:,.0f}" for each in (cost.plain, cost.checkpointed)),
            microbatch(run), f"{training_bytes(run, cost) / 1e9:,.1f}",
        ])  # fmt: skip
    header = ["preset", "parameters, M", "GFLOPs", "MiB per image", "with `use_checkpoint`", "microbatch", "GB in all"]
    total = sum(preset_cost(name)[1].plain.parameters for name in FULL_SIZE)
    return (
        f"{markdown_table(header, rows)}\n\n"
        f"{' + '.join(f'`{name}`' for name in FULL_SIZE)} = {total / 1e6:,.0f} M parameters.\n\n"
        "GFLOPs: of a pass over one image. MiB per image: what each image of a micro-batch adds to the memory in\n"
        "training; at 1024 pixels, one of the parts of 256 that are trained on. GB in all: the memory to train with "
        "the\npreset's own microbatch. All in fp32.\n"
    )
