"""The layouts of other projects whose files load like our own checkpoints.

To add one: a row of ``LAYOUTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from ...config import InputError, named
from . import dalle2_pytorch, glide_clip, stable_cascade
from .reading import content_of, recognize
from .structure import is_unet

_WRAPPED = "module."


@dataclass(frozen=True)
class Layout:
    """fits:    whether a file with weights of these names is such a one.
    content: (weights, path) → what ``load_file`` would give for a checkpoint of ours, and what the file is taken for,
             after its path. InputError for what neither shapes nor published files tell."""

    fits: Callable[[Collection[str]], bool]
    content: Callable[[Mapping[str, Tensor], str], tuple[dict[str, Any], str]]


def _unet(state: Mapping[str, Tensor], path: str) -> tuple[dict[str, Any], str]:
    found = recognize(state, path)
    return content_of(found, state, path), str(found)


def refuse_lora(names: Collection[str], path: str) -> None:
    """InputError, with what makes one of ours of it, for a file of ``path`` that is another project's LoRA."""
    if stable_cascade.is_lora(names):
        _lora(names, path)


def _lora(state: Collection[str], path: str) -> NoReturn:
    raise InputError(
        f"{path} is a LoRA of Stable Cascade, which does not name what it changes: make one of ours, for "
        f"{named('lora')}, by {stable_cascade.command('lora', path)}"
    )


def _cascade(state: Mapping[str, Tensor], path: str) -> NoReturn:
    kind = stable_cascade.network_in(state)
    also = " (with previewer.safetensors, to see what stage C makes)" if kind == "semantic" else ""
    raise InputError(
        f"{path} holds the weights of a {kind} of Stable Cascade: make a checkpoint of it{also} by "
        f"{stable_cascade.network_command(kind, [path])}, and give that"
    )


def _decoder(state: Mapping[str, Tensor], path: str) -> NoReturn:
    raise InputError(
        f"{path} is a decoder of DALLE2-pytorch, whose settings are in the file of its training alone: make a "
        f"checkpoint of it with diff-dalle convert --model_path {path} --decoder_config FILE.json"
    )


def _half_of_clip(state: Mapping[str, Tensor], path: str) -> NoReturn:
    raise InputError(
        f"{path} is half of GLIDE's noised CLIP: make a checkpoint of both halves by {glide_clip.command(state, path)}"
    )


LAYOUTS = (
    Layout(is_unet, _unet),
    Layout(stable_cascade.is_controlnet, stable_cascade.controlnet_content),
    Layout(stable_cascade.is_lora, _lora),
    Layout(dalle2_pytorch.is_decoder, _decoder),
    Layout(lambda names: bool(glide_clip.half_of(names)), _half_of_clip),
    Layout(lambda names: stable_cascade.network_in(names) != "", _cascade),
)


def find_layout(names: Collection[str]) -> Layout | None:
    """Of a file with weights of these names; None = another one."""
    return next((layout for layout in LAYOUTS if layout.fits(names)), None)


def weights_in(content: Any) -> dict[str, Any] | None:
    """The weights that a file holds in one of ``LAYOUTS``, alone or as its ``state_dict``, without the prefix of
    DistributedDataParallel. None = it holds none."""
    state = _named(content)
    return state if state is not None and find_layout(state) else None


def _named(content: Any) -> dict[str, Any] | None:
    """The values by name that a file holds."""
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if isinstance(content, Mapping) and (found := dalle2_pytorch.flattened(content)):
        content = found
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        return None
    wrapped = all(name.startswith(_WRAPPED) for name in content)
    return {name.removeprefix(_WRAPPED) if wrapped else name: value for name, value in content.items()}
