"""Names and arrangement of weights there and here.

Both networks compute the same function. There, rows of a projection to queries, keys and values are ordered by (head,
role), in Guided-Diffusion's "new" order and here by (role, head); 1×1 convolutions have one or two axes more; and a
table of classes has no row for "no class".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Parts of our names and what stands for them there, tried in this order.
_GENERATOR = (
    (r"^unet\.(?:encoder\.)?", ""),
    (r"^text_emb\.", "transformer_proj."),
    (r"^text_encoder\.token_emb\.", "token_embedding."),
    (r"^text_encoder\.position_emb$", "positional_embedding"),
    (r"^text_encoder\.padding_emb$", "padding_embedding"),
    (r"^text_encoder\.norm\.", "final_ln."),
    (r"^text_encoder\.blocks\.", "transformer.resblocks."),
    (r"(\.resblocks\.\d+)\.attention_norm\.", r"\1.ln_1."),
    (r"(\.resblocks\.\d+)\.attention\.qkv\.", r"\1.attn.c_qkv."),
    (r"(\.resblocks\.\d+)\.attention\.proj\.", r"\1.attn.c_proj."),
    (r"(\.resblocks\.\d+)\.mlp_norm\.", r"\1.ln_2."),
    (r"(\.resblocks\.\d+)\.mlp_in\.", r"\1.mlp.c_fc."),
    (r"(\.resblocks\.\d+)\.mlp_out\.", r"\1.mlp.c_proj."),
    (r"^out_norm\.", "out.0."),
    (r"^out_conv\.", "out.2."),
)
_CLASSIFIER = (
    (r"^tower\.", ""),
    (r"^norm\.", "out.0."),
    (r"^pool\.position_emb$", "out.2.positional_embedding"),
    (r"^pool\.(?:q|kv)\.", "out.2.qkv_proj."),
    (r"^pool\.proj\.", "out.2.c_proj."),
)
#: Residual blocks, time embedding and changes of resolution.
RESIDUALS = (
    (r"(^|\.)time_emb\.", r"\1time_embed."),
    (r"(^|\.)middle\.", r"\1middle_block."),
    (r"\.in_norm\.", ".in_layers.0."),
    (r"\.in_conv\.", ".in_layers.2."),
    (r"(_blocks?\.[\d.]+)\.emb\.", r"\1.emb_layers.1."),
    (r"\.out_norm\.", ".out_layers.0."),
    (r"\.out_conv\.", ".out_layers.3."),
    (r"\.skip\.", ".skip_connection."),
    (r"(^|\.)(input_blocks\.\d+\.0)\.conv\.", r"\1\2.op."),
)
_ATTENTION = (
    (r"\.attention\.qkv\.", ".qkv."),
    (r"\.attention\.context_kv\.", ".encoder_kv."),
    (r"\.attention\.proj\.", ".proj_out."),
)
#: Weights that are 1×1 convolutions there and matrices here: of images (skip_connection), else of sequences.
CONVOLUTIONS = re.compile(
    r"(^|\.)(qkv|encoder_kv|adjust_kv_dim|proj_out|qkv_proj|c_proj|clip_proj|skip_connection|ffn\.\d)\.weight$"
)

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Weight:
    """A weight's name here (``own``) and there (``other``), its shape here, and how its values go from there to here
    (``take``) and back (``give``)."""

    own: str
    other: str
    shape: tuple[int, ...]
    take: Change
    give: Change

    @property
    def other_shape(self) -> tuple[int, ...]:
        return tuple(self.give(torch.empty(self.shape, device="meta")).shape)


def weights_of(network: nn.Module, new_order: bool) -> Iterator[Weight]:
    """All weights of a network, which may be on the meta device. new_order: of the rows of the U-Net's projections."""
    table = (_GENERATOR if hasattr(network, "unet") else _CLASSIFIER) + RESIDUALS + _ATTENTION
    for own, value in network.state_dict().items():
        other = own
        for pattern, replacement in table:
            other = re.sub(pattern, replacement, other)
        changes = list(_changes(network, own, other, value, new_order))
        take, give = chained([take for take, _ in changes]), chained([give for _, give in reversed(changes)])
        yield Weight(own, other, tuple(value.shape), take, give)


def chained(changes: Sequence[Change]) -> Change:
    return functools.partial(functools.reduce, lambda value, change: change(value), changes)


def _changes(
    network: nn.Module, own: str, other: str, value: Tensor, new_order: bool
) -> Iterator[tuple[Change, Change]]:
    """What ``Weight.take`` does, step by step, each with its inverse."""
    layer = (other.split(".")[-2:-1] or [""])[0]
    if CONVOLUTIONS.search(other) and not other.startswith("transformer."):
        yield flat(value.ndim, 4 if layer == "skip_connection" else 3)
    if layer in ("qkv", "c_qkv") and not (new_order and layer == "qkv"):
        yield by_role(network, own, 3)
    if layer == "encoder_kv":
        yield by_role(network, own, 2)
    if other == "label_emb.weight":
        yield lambda value: torch.cat([value, value.new_zeros(1, value.shape[1])]), lambda value: value[:-1]
    if other.endswith(".positional_embedding"):
        yield torch.t, torch.t
    if layer == "qkv_proj":
        yield part_of_three(value, own)


def flat(axes: int, axes_there: int) -> tuple[Change, Change]:
    """A weight without the axes that a convolution of width 1 has."""
    added = [1] * (axes_there - axes)
    return functools.partial(torch.flatten, start_dim=axes - 1), lambda value: value.view(*value.shape, *added)


def part_of_three(value: Tensor, own: str) -> tuple[Change, Change]:
    """Queries, or keys and values, of an attention pool: two of our weights, whose rows are one there."""
    rows = len(value)
    begin = rows // 2 if own.startswith("pool.kv.") else 0
    return lambda value: value[begin : begin + rows], lambda value: value


def by_role(network: nn.Module, own: str, roles: int) -> tuple[Change, Change]:
    """From (head, role) to (role, head), and back."""
    heads = network.get_submodule(own.rpartition(".")[0].rpartition(".")[0]).heads
    assert isinstance(heads, int)
    return functools.partial(_swapped, first=heads, second=roles), functools.partial(
        _swapped, first=roles, second=heads
    )


def _swapped(value: Tensor, first: int, second: int) -> Tensor:
    return value.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)


def names_table(network: nn.Module, new_order: bool) -> dict[str, Weight]:
    """The weights of a generator's U-Net by their names there; layers that the others lack keep our names."""
    return {each.other: each for each in weights_of(network, new_order) if each.own.startswith("unet.")}
