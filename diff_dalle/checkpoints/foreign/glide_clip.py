"""GLIDE's noised CLIP, whose two halves are files of their own: the image encoder and the text encoder."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Fault, InputError, to_dict
from ...diffusion.diffusion_config import NoiseConfig
from ...models.vit_clip import VitClipConfig
from ..checkpoint import Identity, file_content
from ..pixels import VitClipSettings
from .names import Weight, give_weights, same, take_weights

IMAGE, TEXT = "image_tower.", "text_tower."
_MARKS = {IMAGE: {"blocks.input.w_t", "blocks.input.patch_proj"}, TEXT: {"blocks.input.w_voc", "blocks.input.w_pos"}}
HEAD_CHANNELS = 64  # of the published halves
#: Names here, of a tower, and there; the rows of `qkv` are three weights there, of which keys have no bias.
_NAMES = {
    "time_emb": "input.w_t",
    "patches.weight": "input.patch_proj",
    "token_emb": "input.w_voc",
    "position_emb": "input.w_pos",
    "in_norm": "input.ln",
    "norm": "output.ln",
    "proj": "output.f",
}
_LAYERS = {
    "attention_norm": "f_attn.ln",
    "attention.proj": "f_attn.f_c",
    "mlp_norm": "f_mlp.ln",
    "mlp_in": "f_mlp.f_1",
    "mlp_out": "f_mlp.f_2",
}


def half_of(names: Collection[str]) -> str:
    """The tower that a file with weights of these names is; empty = none."""
    return next((tower for tower, marks in _MARKS.items() if marks <= set(names)), "")


def command(names: Collection[str], path: str) -> str:
    """What makes a checkpoint of both halves, of which one has weights of these names."""
    files = {IMAGE: "clip_image_enc.pt", TEXT: "clip_text_enc.pt", half_of(names): path}
    return f"diff-dalle convert --model_path {files[IMAGE]} --text_path {files[TEXT]} --bpe_path clip"


def clip_content(
    image: Mapping[str, Tensor], text: Mapping[str, Tensor], paths: tuple[str, str], head_channels: int = HEAD_CHANNELS
) -> dict[str, Any]:
    """The content of a checkpoint of ours of both halves. InputError for files that are not those, and for weights too
    many, too few or of another shape."""
    for half, path, tower in ((image, paths[0], IMAGE), (text, paths[1], TEXT)):
        if half_of(half) != tower:
            raise InputError(f"{path} is not the {tower.partition('_')[0]} encoder of GLIDE's noised CLIP")
    for half, name in ((image, "w_t"), (text, "w_voc")):
        width = half[f"blocks.input.{name}"].shape[-1]
        if head_channels < 1 or width % head_channels:
            rule = f"must divide {width}, the width of one of the halves"
            raise InputError(Fault("num_head_channels", rule, head_channels))
    try:
        settings = _settings(image, text, head_channels)
    except (KeyError, IndexError, ValueError):
        raise InputError(f"{paths[0]} and {paths[1]} have shapes of no noised CLIP of GLIDE") from None
    with torch.device("meta"):
        network = settings.build()
    own = dict[str, Tensor]()
    for tower, half, path in ((IMAGE, image, paths[0]), (TEXT, text, paths[1])):
        own |= take_weights(_weights(network, tower), half, path, "a noised CLIP of GLIDE of this width and depth")
    tokenizer = f"clip-{settings.model.token_rows}"
    state = {name: value.float() for name, value in own.items()}
    return file_content("model", Identity(settings.name, to_dict(settings), tokenizer), 0, 0, state)


def clip_states(network: nn.Module, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of the image encoder and of the text encoder as GLIDE has them. path: of the checkpoint."""
    image, text = (give_weights(_weights(network, tower), network, path, "GLIDE") for tower in (IMAGE, TEXT))
    return image, text


def _weights(network: nn.Module, tower: str) -> Iterator[Weight]:
    """Of one tower."""
    for own, value in network.state_dict().items():
        if not own.startswith(tower):
            continue
        names = _names(own.removeprefix(tower))
        shape = (len(value) // len(names), *value.shape[1:])
        for part, other in enumerate(names):
            take = same if other else functools.partial(_zeros, shape)
            yield Weight(own, other, shape, take, functools.partial(_part, part, len(names)))


def _zeros(shape: tuple[int, ...], _: Tensor) -> Tensor:
    return torch.zeros(shape)


def _part(i: int, count: int, value: Tensor) -> Tensor:
    return value.chunk(count)[i].clone()


def _names(name: str) -> list[str]:
    """The weights there of one of a tower here, in the order of its rows; "" = it is not there."""
    if name in _NAMES:
        return [f"blocks.{_NAMES[name]}"]
    module, _, kind = name.rpartition(".")
    is_norm = module.endswith("norm")
    ending = {"weight": "g" if is_norm else "w", "bias": "b"}[kind]
    if layer := re.fullmatch(r"blocks\.(\d+)\.(.+)", module):
        block = f"blocks.block_{layer[1]}"
        if layer[2] == "attention.qkv":
            roles = [f"{block}.f_attn.f_{role}.{ending}" for role in "qkv"]
            return roles if ending == "w" else [roles[0], "", roles[2]]
        return [f"{block}.{_LAYERS[layer[2]]}.{ending}"]
    return [f"blocks.{_NAMES[module]}.{ending}"]


def _settings(image: Mapping[str, Tensor], text: Mapping[str, Tensor], head_channels: int) -> VitClipSettings:
    timesteps, image_width = image["blocks.input.w_t"].shape
    token_rows, text_width = text["blocks.input.w_voc"].shape
    patch = image["blocks.input.patch_proj"].shape[-1]
    depths = [len({name.split(".")[1] for name in half if ".block_" in name}) for half in (image, text)]
    model = VitClipConfig(
        image_size=patch * round((len(image["blocks.input.w_pos"]) - 1) ** 0.5),
        patch_size=patch,
        timesteps=timesteps,
        dim=len(image["blocks.output.f.w"]),
        image_width=image_width,
        image_depth=depths[0],
        image_heads=image_width // head_channels,
        text_width=text_width,
        text_depth=depths[1],
        text_heads=text_width // head_channels,
        text_length=len(text["blocks.input.w_pos"]),
        token_rows=token_rows,
    )
    return VitClipSettings(model, diffusion=NoiseConfig(timesteps, "cosine", False))
