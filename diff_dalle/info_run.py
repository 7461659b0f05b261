"""What ``info.py`` says: what is in a checkpoint file, and what a generator costs, without allocating it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .batch import Conditioning
from .config import from_dict, option, section
from .diffusion.diffusion_config import DiffusionConfig
from .evaluation.report import markdown_table
from .models.cost import Cost, measure
from .models.generator import Generator, GeneratorConfig
from .tasks.generator_run import KIND, GeneratorRun, build_tokenizer
from .training.checkpoint import ROLES, load_file

MICROBATCHES = (1, 4, 16, 64)


@dataclass(frozen=True)
class InfoConfig:
    """What to describe"""

    model_path: str = option("", "checkpoint file; empty = the generator that the other settings describe")


@dataclass(frozen=True)
class InfoRun(GeneratorRun):
    """The settings of a generator's run, and a checkpoint to look at instead."""

    what: InfoConfig = section(InfoConfig)


def describe(run: InfoRun) -> str:
    """The text that ``info.py`` prints. InputError for a file that is no checkpoint."""
    if run.what.model_path:
        return describe_file(run.what.model_path)
    tokenizer = build_tokenizer(run)
    return describe_generator(run.model, run.diffusion, tokenizer.vocab_size if tokenizer else 0)


def describe_file(path: str) -> str:
    """Role, age and settings of a checkpoint file, and its generator's cost."""
    content = load_file(path, roles=tuple(ROLES))
    lines = [f"{path} holds {ROLES[content['role']]} of a {content['kind']} after {content['step']:,} steps and "
             f"{content['samples']:,} samples; tokenizer {content['tokenizer'] or 'none'}."]  # fmt: skip
    for name in ("model", "diffusion", "tokenizer"):
        settings = ", ".join(f"{key} {value}" for key, value in _flat(content["config"].get(name, {})))
        lines.append(f"{name}: {settings}")
    if content["kind"] == KIND and content["role"] != "optimizer":
        model = from_dict(GeneratorConfig, content["config"]["model"], "model")
        diffusion = from_dict(DiffusionConfig, content["config"]["diffusion"], "diffusion")
        embedding = content["state"].get("text_encoder.token_emb.weight")
        lines += ["", describe_generator(model, diffusion, 0 if embedding is None else len(embedding))]
    return "\n".join(lines)


def _flat(settings: dict):
    for key, value in settings.items():
        yield from _flat(value) if isinstance(value, dict) else [(key, value)]


def describe_generator(config: GeneratorConfig, diffusion: DiffusionConfig, vocab_size: int) -> str:
    """Parameters, FLOPs and memory of a generator, measured on the meta device."""
    cost = generator_cost(config, diffusion, vocab_size)
    recomputing = replace(config, unet=replace(config.unet, use_checkpoint=True))
    lean = generator_cost(recomputing, diffusion, vocab_size)
    size = config.unet.image_size
    rows = [[n, *(_gib(each.training_bytes(n)) for each in (cost, lean))] for n in MICROBATCHES]
    table = markdown_table(["microbatch", "GiB to train in fp32", "with use_checkpoint"], rows)
    return (
        f"{cost.parameters:,} parameters; {cost.flops / 1e9:,.1f} GFLOPs for one pass over one image of {size}×{size} "
        f"pixels.\nMemory: weights, gradients, AdamW's moments, one average, and the activations of a micro-batch "
        f"(half precision needs about half of those).\n\n{table}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"


def generator_cost(config: GeneratorConfig, diffusion: DiffusionConfig, vocab_size: int) -> Cost:
    """Cost of a training pass over one image, for a generator built on the meta device."""
    with torch.device("meta"):
        model = Generator(config, vocab_size, diffusion.out_channels)
        length, size = config.text.text_length, config.unet.image_size
        cond = Conditioning(
            tokens=torch.zeros(1, length, dtype=torch.int64) if config.text.enc_attn_dim else None,
            mask=torch.ones(1, length, dtype=torch.bool) if config.text.enc_attn_dim else None,
            labels=torch.zeros(1, dtype=torch.int64) if config.unet.num_classes else None,
        )
        x, t = torch.zeros(1, 3, size, size), torch.zeros(1, dtype=torch.int64)
        return measure(model, lambda network: network(x, t, cond))
