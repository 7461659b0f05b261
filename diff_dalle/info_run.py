"""What ``info.py`` says: what is in a checkpoint file, and what a network costs, without allocating it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from .batch import Conditioning
from .command_line import parse
from .config import from_dict, option, section
from .diffusion.diffusion_config import DiffusionConfig
from .errors import InputError
from .evaluation.report import markdown_table
from .models.cost import Cost, measure
from .models.generator import Generator, GeneratorConfig
from .models.noised_clip import NoisedClip, NoisedClipConfig
from .tasks.classifier_run import ClassifierRun
from .tasks.generator_run import GeneratorRun
from .training.checkpoint import ROLES, load_file

MICROBATCHES = (1, 4, 16, 64)


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


def describe(run: GeneratorInfo | ClassifierInfo) -> str:
    """The text that ``info.py`` prints. InputError for a file that is no checkpoint."""
    if run.what.model_path:
        return describe_file(run.what.model_path)
    tokenizer = run.build_tokenizer()
    vocab_size = tokenizer.vocab_size if tokenizer else 0
    if isinstance(run, ClassifierInfo):
        return describe_classifier(run.model, vocab_size)
    return describe_generator(run.model, run.diffusion, vocab_size)


def describe_file(path: str) -> str:
    """Role, age and settings of a checkpoint file, and its network's cost."""
    content = load_file(path, roles=tuple(ROLES))
    lines = [f"{path} holds {ROLES[content['role']]} of a {content['kind']} after {content['step']:,} steps and "
             f"{content['samples']:,} samples; tokenizer {content['tokenizer'] or 'none'}."]  # fmt: skip
    for name in ("model", "diffusion", "contrastive", "tokenizer"):
        if name in content["config"]:
            settings = ", ".join(f"{key} {value}" for key, value in _flat(content["config"][name]))
            lines.append(f"{name}: {settings}")
    if content["role"] != "optimizer":
        lines += ["", _describe_network(content)]
    return "\n".join(lines)


def _flat(settings: dict):
    for key, value in settings.items():
        yield from _flat(value) if isinstance(value, dict) else [(key, value)]


def _describe_network(content: Mapping) -> str:
    """The cost of the network whose weights a checkpoint holds."""
    settings = content["config"]["model"]
    vocab_size = next((len(value) for name, value in content["state"].items() if name.endswith("token_emb.weight")), 0)
    if content["kind"] == ClassifierRun.kind:
        return describe_classifier(from_dict(NoisedClipConfig, settings, "model"), vocab_size)
    diffusion = from_dict(DiffusionConfig, content["config"]["diffusion"], "diffusion")
    return describe_generator(from_dict(GeneratorConfig, settings, "model"), diffusion, vocab_size)


def describe_generator(config: GeneratorConfig, diffusion: DiffusionConfig, vocab_size: int) -> str:
    """Parameters, FLOPs and memory of a generator, measured on the meta device."""
    recomputing = replace(config, unet=replace(config.unet, use_checkpoint=True))
    plain, lean = (generator_cost(each, diffusion, vocab_size) for each in (config, recomputing))
    return _cost_text(plain, lean, config.unet.image_size, "use_checkpoint")


def describe_classifier(config: NoisedClipConfig, vocab_size: int) -> str:
    """The same of a classifier, for one image and its caption."""
    recomputing = replace(config, classifier_use_checkpoint=True)
    plain, lean = (classifier_cost(each, vocab_size) for each in (config, recomputing))
    return _cost_text(plain, lean, config.image_size, "classifier_use_checkpoint")


def _cost_text(plain: Cost, lean: Cost, size: int, flag: str) -> str:
    rows = [[n, *(f"{each.training_bytes(n) / 2**30:,.2f}" for each in (plain, lean))] for n in MICROBATCHES]
    table = markdown_table(["microbatch", "GiB to train in fp32", f"with {flag}"], rows)
    return (
        f"{plain.parameters:,} parameters; {plain.flops / 1e9:,.1f} GFLOPs for a pass over one image of {size}×{size} "
        f"pixels.\nMemory: weights, gradients, AdamW's moments, one average, and the activations of a micro-batch "
        f"(half precision needs about half of those).\n\n{table}"
    )


def generator_cost(config: GeneratorConfig, diffusion: DiffusionConfig, vocab_size: int) -> Cost:
    """Cost of a training pass over one image, for a generator built on the meta device."""
    with torch.device("meta"):
        model = Generator(config, vocab_size, diffusion.out_channels)
        cond = _caption(config.text.text_length) if config.text.enc_attn_dim else Conditioning()
        if config.unet.num_classes:
            cond = replace(cond, labels=torch.zeros(1, dtype=torch.int64))
        x, t = _image(config.unet.image_size)
        return measure(model, lambda network: network(x, t, cond))


def classifier_cost(config: NoisedClipConfig, vocab_size: int) -> Cost:
    """Cost of a training pass over one image and its caption, for a classifier built on the meta device."""
    with torch.device("meta"):
        model = NoisedClip(config, vocab_size)
        cond, (x, t) = _caption(config.text_length), _image(config.image_size)
        return measure(model, lambda network: network.encode_image(x, t) * network.encode_text(cond.tokens, cond.mask))


def _caption(length: int) -> Conditioning:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return Conditioning(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool))


def _image(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 3, size, size), torch.zeros(1, dtype=torch.int64)
