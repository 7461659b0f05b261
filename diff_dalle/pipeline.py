"""Checkpoints and prompts → images: what library users, ``sample.py`` and training's previews end in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from .batch import Conditioning
from .config import disagreements, from_dict, to_dict
from .diffusion.gaussian_diffusion import DiffusionConfig, create_gaussian_diffusion
from .diffusion.sampling import SamplingConfig, sample_images
from .errors import InputError
from .models.generator import Generator, GeneratorConfig
from .text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from .training.checkpoint import load_file, load_weights
from .training.precision import autocast, resolve_precision


def load(path: str, device: str = "auto", precision: str = "auto", bpe_path: str | None = None) -> Pipeline:
    """A generator ready to sample, from a model or EMA checkpoint alone.

    path:      ``ema_….pt`` (better pictures) or ``model….pt``, local or remote.
    device:    auto, cpu, cuda, cuda:1, mps, …; auto takes CUDA, then MPS, then the CPU.
    precision: auto, fp32, bf16 or fp16.
    bpe_path:  where the tokenizer's vocabulary lies now, if it was a file that has moved since training.

    Raises InputError for a file that is no generator's checkpoint, or whose tokenizer cannot be found.
    """
    content = load_file(path)
    if content["kind"] != "generator":
        raise InputError(f"{path} holds a {content['kind']}, but a generator is needed")
    config = content["config"]
    model_config = from_dict(GeneratorConfig, config["model"], "model")
    diffusion = from_dict(DiffusionConfig, config["diffusion"], "diffusion")
    tokenizer = _tokenizer_of(content, path, bpe_path) if content["tokenizer"] else None
    with torch.device("meta"):
        model = Generator(model_config, tokenizer.vocab_size if tokenizer else 0, diffusion.out_channels)
    model.to_empty(device="cpu")
    load_weights(model, content, path)
    place = pick_device(device)
    return Pipeline(model.to(place).eval(), diffusion, tokenizer, resolve_precision(precision, place))
