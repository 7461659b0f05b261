"""What ``import_cascade.py`` does: a checkpoint of a cascade's network from files that hold it in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .. import storage
from ..checkpoints.cascade import StageBSettings, TrainedWith
from ..checkpoints.checkpoint import (
    Identity,
    LoadedWeights,
    check_weights,
    load_file,
    named_tensors,
    save_file,
    write_file,
)
from ..checkpoints.controlnets import BaseRecord
from ..checkpoints.foreign.stable_cascade import controlnet_content, lora_of
from ..checkpoints.kind import NetworkKind
from ..checkpoints.kinds import find_kind
from ..checkpoints.loading import open_network
from ..checkpoints.lora_file import write_lora
from ..config import InputError, to_dict
from ..distributed.devices import without_values
from ..embeddings.contract import weights_digest
from ..models.latent.released import find_released
from ..models.latent.semantic import SEMANTIC_SIZES
from ..models.latent.stage_a import STAGE_A_SIZES
from ..models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageC
from ..recipes.cascade.session import IMAGE_NAME, TEXT_NAME, named_clip
from ..tasks.latent import SEMANTIC
from ..text.trained_tokens import find_tokens, parse_token
from .file_settings import ADAPTERS, ImportConfig
from .gathering import adapter_clip, check_new

SIZES: dict[str, Mapping[str, Any]] = {
    "stage_a": STAGE_A_SIZES,
    "semantic": SEMANTIC_SIZES,
    "stage_b": STAGE_B_SIZES,
    "stage_c": STAGE_C_SIZES,
}
IMAGE_SIZES = {"stage_b": 1024, "stage_c": 768}  # pixels per side that they were trained on


def import_cascade(config: ImportConfig) -> str:
    """Write the checkpoint; returns a text about what was taken. Raises InputError for files of anything else, and for
    an ``out`` that exists."""
    check_new(config.out)
    if config.stage in ADAPTERS:
        return {"controlnet": _controlnet, "lora": _lora}[config.stage](config)
    kind = find_kind(config.stage)
    if config.joint_run:
        settings, state, step, samples, text = _of_joint_run(kind, config.joint_run)
    else:
        sizes = SIZES[config.stage]
        if config.model_version not in sizes:
            raise InputError(f"model_version is {config.model_version!r}, but must be one of {', '.join(sizes)}")
        settings, step, samples = _settings(kind, sizes[config.model_version]), 0, 0
        state, text = _converted(settings, config.weights)
    save_file(config.out, "model", Identity(kind.name, to_dict(settings)), step, samples, state)
    return f"{text}\nWrote {config.out}."


def _controlnet(config: ImportConfig) -> str:
    saved, (path,) = open_network(config.base, "stage_c"), config.weights
    record = BaseRecord(weights_digest(saved.weights()), saved.settings.trained_with.image_size)
    chosen = config.controlnet_blocks, config.controlnet_filter, config.controlnet_filter_params
    content, text = controlnet_content(_read(path), path, saved.settings.model, record, *chosen)
    with storage.atomic_writer(config.out) as file:
        write_file(file, content)
    return f"{path} {text}\nWrote {config.out}."


def _lora(config: ImportConfig) -> str:
    saved, (path,) = open_network(config.base, "stage_c"), config.weights
    with without_values():
        network = cast(StageC, saved.build())
    clip = adapter_clip(saved, config.clip_path) if config.train_tokens else None
    specs = [parse_token(entry) for entry in config.train_tokens]
    tokens = find_tokens(clip.tokenizer, specs) if clip else None
    identity = clip.identity if clip else ""
    chosen = config.module_filters, config.train_tokens, tokens, identity
    lora = lora_of(_read(path), path, network, weights_digest(saved.weights()), *chosen)
    with storage.atomic_writer(config.out) as file:
        write_lora(file, lora.about, lora.tensors)
    return f"{path}: a LoRA of rank {lora.about.rank} of {len(lora.pairs) // 2} modules\nWrote {config.out}."


def _settings(kind: type[NetworkKind], model: Any) -> Any:
    """Those of the public networks, with which stages B and C are used."""
    if kind.name not in ("stage_b", "stage_c"):
        return cast(Any, kind)(model=model)
    text = named_clip(TEXT_NAME, "released") if not model.text.enc_attn_dim and model.vector_width else None
    image = named_clip(IMAGE_NAME, "released") if model.embedding_width else None
    known = TrainedWith(IMAGE_SIZES[kind.name], text_clip=text, image_clip=image)
    settings = cast(Any, kind)(model=model, trained_with=known)
    if kind.name == "stage_b":
        ratio = IMAGE_SIZES["stage_c"] / IMAGE_SIZES["stage_b"]
        return replace(settings, sampling=replace(settings.sampling, semantic_scale=ratio))
    return settings


def _converted(settings: Any, paths: tuple[str, ...]) -> tuple[dict[str, Tensor], str]:
    """A network's state from files, and what was taken; with initial values for what none of them has."""
    if settings.name in ("stage_b", "stage_c") and settings.model.text.enc_attn_dim:
        raise InputError(
            f"model_version is that of a {settings.name} with a text encoder of its own, which no file has"
        )
    with without_values():
        shape = settings.build()
    state: dict[str, Tensor] = {}
    unused: list[str] = []
    for path in paths:
        weights = _read(path)
        layout = find_released(settings.name, weights)
        if layout is None:
            names = ", ".join(list(weights)[:3]) or "nothing"
            raise InputError(f"{path} holds no weights of a {settings.name}: names look like {names}; check --stage")
        found = layout.read(shape, weights)
        state |= found.state
        unused += found.unused
    taken, missing = list(state), [name for name in shape.state_dict() if name not in state]
    if missing:
        torch.manual_seed(0)
        initial = settings.build().state_dict()
        state |= {name: initial[name] for name in missing}
    return state, f"{', '.join(paths) or 'no file'}: {LoadedWeights(taken, missing, unused)}"


def _read(path: str) -> Mapping[str, Tensor]:
    """The named tensors of a file. InputError for one that holds anything else."""
    if (found := named_tensors(path)) is None:
        raise InputError(f"{path} is not a file of named tensors")
    return found


def _of_joint_run(kind: type[NetworkKind], path: str) -> tuple[Any, dict[str, Tensor], int, int, str]:
    """Settings, state, step and samples of the semantic encoder that was trained with a stage B, and what to say."""
    content = load_file(path, ("optimizer",), values=True)
    model, state = None, content["state"].get("modules", {}).get(SEMANTIC)
    if content["kind"] == "stage_b" and state is not None:
        known: TrainedWith = StageBSettings.read(content["config"]).trained_with
        model = known.encoder
    if model is None:
        raise InputError(f"{path} holds no semantic encoder: give the opt….pt of a stage B trained with train_encoder")
    settings, step = cast(Any, kind)(model=model), content["step"]
    with without_values():
        network = settings.build()
    check_weights(network, {"state": state}, path)
    text = f"{path}: the semantic encoder after {step:,} steps with stage B"
    return settings, dict(state), step, content["samples"], text
