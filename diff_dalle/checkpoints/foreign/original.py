"""The layout of Diff-DALLE, which is Guided-Diffusion's with text: names and arrangement of weights there and here.

Both networks compute the same function. There, attention has two parts, of which the second reads the caption with one
projection as keys and values alike, or with none where the widths are equal; the text encoder has sinusoidal positions
and no norm at its end; and the caption reaches the network by attention only. The logit scale is one function of two
numbers that differ by log 100.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ...models.noised_clip import MAX_SCALE
from .names import CONVOLUTIONS, RESIDUALS, Change, Weight, by_role, chained, flat, part_of_three

IMAGES = "image_encoder."  # of a classifier; without this, the names of its half are a generator's
TEXTS = "text_encoder."
POSITIONS = 5000  # of captions, in the table that a checkpoint has
_MARK = "middle_block.1.attn1.qkv.weight"
_BLOCK = r"((?:input|output)_blocks\.\d+\.\d+|middle_block\.\d+|encoder\.\d+)"
_GENERATOR = ((r"^unet\.(?:encoder\.)?", ""), (r"^out_norm\.", "out.0."), (r"^out_conv\.", "out.2."))
_CLASSIFIER = (
    (r"^image_tower\.", IMAGES),
    (r"^norm\.", f"{IMAGES}out.0."),
    (r"^pool\.position_emb$", f"{IMAGES}out.2.positional_embedding"),
    (r"^pool\.(?:q|kv)\.", f"{IMAGES}out.2.qkv_proj."),
    (r"^pool\.proj\.", f"{IMAGES}out.2.c_proj."),
    (r"^text_tower\.", TEXTS),
    (r"^scale_logit$", "logit_scale.logit_scale"),
    (rf"^{TEXTS}pool\.", f"{TEXTS}clip_proj."),
)
_ATTENTION = (
    (rf"{_BLOCK}\.norm\.", r"\1.attn1.norm."),
    (r"\.attention_norm\.", ".attn1.norm."),
    (r"\.attention\.qkv\.", ".attn1.qkv."),
    (r"\.attention\.proj\.", ".attn1.proj_out."),
    (r"\.text_norm\.", ".attn2.norm."),
    (r"\.text_attention\.q\.", ".attn2.qkv."),
    (r"\.text_attention\.kv\.", ".attn2.adjust_kv_dim."),
    (r"\.text_attention\.proj\.", ".attn2.proj_out."),
)
_TEXT = (
    (rf"^{TEXTS}token_emb\.", f"{TEXTS}emb."),
    (rf"^{TEXTS}position_emb$", f"{TEXTS}pos_enc.pe"),
    (r"\.mlp_norm\.", ".ffn.0."),
    (r"\.mlp_in\.", ".ffn.1."),
    (r"\.mlp_out\.", ".ffn.4."),
)
_NAMELESS = re.compile(r"text_emb\.|text_encoder\.pool\.")  # of a generator: the caption as one vector


def guided_names(names: Iterable[str]) -> dict[str, str] | None:
    """The names in such a checkpoint by those that Guided-Diffusion has for the same; None for another layout."""
    names = list(names)
    if _MARK not in names and IMAGES + _MARK not in names:
        return None
    return {name.removeprefix(IMAGES).replace(".attn1.", ".") if TEXTS not in name else name: name for name in names}


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: positional encodings (Vaswani et al. 2017, §3.5), sines and cosines in turn."""
    rates = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angles = torch.arange(length).float().unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def weights_of(network: nn.Module) -> Iterator[Weight]:
    """All weights of a generator or noised CLIP, which may be on the meta device."""
    table = _GENERATOR if hasattr(network, "unet") else _CLASSIFIER
    for own, value in network.state_dict().items():
        other = own
        for pattern, replacement in (*table, *RESIDUALS, *_TEXT):
            other = re.sub(pattern, replacement, other)
        other = re.sub(rf"^({TEXTS})blocks\.(\d+)(.*)", _layer, other)
        for pattern, replacement in _ATTENTION:
            other = re.sub(pattern, replacement, other)
        changes = list(_changes(network, own, other, value))
        take, give = chained([take for take, _ in changes]), chained([give for _, give in reversed(changes)])
        if _has_no_name(network, own, other):
            other, take = "", functools.partial(_constant, own, tuple(value.shape))
        yield Weight(own, other, tuple(value.shape), take, give)


def _layer(found: re.Match[str]) -> str:
    """Attention and MLP of a layer are two there."""
    return f"{found[1]}encoder.{2 * int(found[2]) + ('.ffn.' in found[3])}{found[3]}"


def _has_no_name(network: nn.Module, own: str, other: str) -> bool:
    if ".adjust_kv_dim." in other:
        rows, columns = network.get_parameter(f"{own.rpartition('.')[0]}.weight").shape
        return rows == 2 * columns
    return hasattr(network, "unet") and _NAMELESS.match(other) is not None


def _constant(own: str, shape: tuple[int, ...], _: Tensor) -> Tensor:
    """What makes our network compute theirs: keys and values are the caption's states, and it counts nowhere else."""
    if own.endswith(".text_attention.kv.weight"):
        return torch.eye(shape[1]).repeat(2, 1)
    return torch.zeros(shape)


def _changes(network: nn.Module, own: str, other: str, value: Tensor) -> Iterator[tuple[Change, Change]]:
    """What ``Weight.take`` does, step by step, each with its inverse."""
    layer = ".".join(other.split(".")[-3:-1])
    if value.ndim == 2 and CONVOLUTIONS.search(other):
        yield flat(value.ndim, 4 if "skip_connection" in other else 3)
    if layer == "attn1.qkv":
        yield by_role(network, own, 3)
    elif layer == "attn2.adjust_kv_dim":
        yield lambda value: torch.cat([value, value]), lambda value: value[: len(value) // 2]
    elif layer == "out.2" and other.endswith("positional_embedding"):
        yield torch.t, torch.t
    elif layer == "2.qkv_proj":
        yield part_of_three(value, own)
    elif other.endswith("pos_enc.pe"):
        yield functools.partial(_first_positions, length=len(value)), _all_positions
    elif own == "scale_logit":
        yield _shifted(-math.log(MAX_SCALE)), _shifted(math.log(MAX_SCALE))


def _first_positions(table: Tensor, length: int) -> Tensor:
    return table[0, :length]


def _all_positions(rows: Tensor) -> Tensor:
    table = sinusoids(POSITIONS, rows.shape[1]).to(rows)
    table[: len(rows)] = rows
    return table.unsqueeze(0)


def _shifted(by: float) -> Change:
    return lambda value: (value.double() + by).to(value)


def odd_weight(network: nn.Module) -> str:
    """The name of a weight whose values their layout cannot hold; empty if there is none."""
    for weight in weights_of(network):
        value = network.get_parameter(weight.own)
        if weight.other:
            changed = weight.take(weight.give(value)) if ".adjust_kv_dim." in weight.other else value
        else:
            changed = weight.take(value).to(value)
        if not torch.equal(changed, value):
            return weight.own
    return ""
