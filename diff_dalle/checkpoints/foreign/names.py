"""Names and arrangement of weights there and here, in the layouts of Guided-Diffusion and of the original Diff-DALLE.

Networks compute the same function here and there. There, rows of a projection to queries, keys and values are ordered
by (head, role), in Guided-Diffusion's "new" order and here by (role, head); 1×1 convolutions have one or two axes more;
and a table of classes has no row for "no class".

The layout of Diff-DALLE is Guided-Diffusion's with another way to read text: attention has two parts, of which the
second reads the caption with one projection as keys and values alike, or with none where the widths are equal; the text
encoder has sinusoidal positions and no norm at its end; and the caption reaches the network by attention only. The
logit scale is one function of two numbers that differ by log 100.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor, nn

from ...config import InputError, load_mapping
from ...models.noised_clip import MAX_SCALE
from ..content import short

TABLES = load_mapping(resources.files(__package__).joinpath("tables.yaml").read_text("utf-8"), "tables.yaml")
IMAGES = "image_encoder."  # of Diff-DALLE's classifier; without this, the names of its half are a generator's
TEXTS = "text_encoder."
POSITIONS = 5000  # of captions, in the table that a checkpoint of Diff-DALLE has
_MARK = "middle_block.1.attn1.qkv.weight"
#: Weights that are 1×1 convolutions there and matrices here: of images (skip_connection), else of sequences.
_CONVOLUTIONS = re.compile(
    r"(^|\.)(qkv|encoder_kv|adjust_kv_dim|proj_out|qkv_proj|c_proj|clip_proj|skip_connection|ffn\.\d)\.weight$"
)
_NAMELESS = re.compile(r"text_emb\.|text_encoder\.pool\.")  # of Diff-DALLE's generator: the caption as one vector

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Weight:
    """A weight's name here (``own``) and there (``other``; empty = it has none), its shape here, and how its values go
    from there to here (``take``) and back (``give``)."""

    own: str
    other: str
    shape: tuple[int, ...]
    take: Change
    give: Change

    @property
    def other_shape(self) -> tuple[int, ...]:
        return tuple(self.give(torch.empty(self.shape, device="meta")).shape)


def weights_of(network: nn.Module, original: bool, new_order: bool = False) -> Iterator[Weight]:
    """All weights of a network, which may be on the meta device.

    original:  in the layout of Diff-DALLE, for a generator or noised CLIP.
    new_order: of the rows of the U-Net's projections.
    """
    layout = TABLES["names"]["original" if original else "guided"]
    pool = getattr(network.config, "pool", "")
    table = [
        *layout.get("pools", {}).get(pool, []),
        *layout["generator" if hasattr(network, "unet") else "classifier"],
        *TABLES["names"]["residuals"],
        *layout["attention"],
    ]
    for own, value in network.state_dict().items():
        other = own
        for pattern, replacement in table:
            other = re.sub(pattern, replacement, other)
        if original:
            other = re.sub(rf"^({TEXTS})blocks\.(\d+)(.*)", _layer, other)
        shape = tuple(value.shape)
        if original and _has_no_name(network, own, other):
            yield Weight(own, "", shape, functools.partial(_constant, own, shape), same)
            continue
        changes = list(_changes(network, own, other, value, new_order))
        take, give = [take for take, _ in changes], [give for _, give in reversed(changes)]
        yield Weight(own, other, shape, functools.partial(_chained, take), functools.partial(_chained, give))


def _chained(changes: Iterable[Change], value: Tensor) -> Tensor:
    return functools.reduce(lambda value, change: change(value), changes, value)


def same(value: Tensor) -> Tensor:
    return value


def _layer(found: re.Match[str]) -> str:
    """Attention and MLP of a layer are two in Diff-DALLE."""
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


def _changes(
    network: nn.Module, own: str, other: str, value: Tensor, new_order: bool
) -> Iterator[tuple[Change, Change]]:
    """What ``Weight.take`` does, step by step, each with its inverse."""
    parent, layer = ["", "", *other.split(".")][-3:-1]
    if value.ndim == 2 and _CONVOLUTIONS.search(other) and not other.startswith("transformer."):
        added = [1, 1] if layer == "skip_connection" else [1]
        yield functools.partial(torch.flatten, start_dim=1), lambda value: value.view(*value.shape, *added)
    if layer in ("qkv", "c_qkv") and parent != "attn2" and not (new_order and layer == "qkv"):
        yield _by_role(network, own, 3)
    elif layer == "encoder_kv":
        yield _by_role(network, own, 2)
    elif layer == "adjust_kv_dim":
        yield lambda value: torch.cat([value, value]), lambda value: value[: len(value) // 2]
    elif layer == "qkv_proj":  # queries, or keys and values, of an attention pool, whose rows are one weight there
        rows, begin = len(value), len(value) // 2 if own.startswith("pool.kv.") else 0
        yield lambda value: value[begin : begin + rows], same
    elif own == "pool.weight" and other == "out.3.weight" and getattr(network.config, "pool", "") == "adaptive":
        yield functools.partial(torch.flatten, start_dim=1), lambda value: value[..., None, None]
    elif other == "label_emb.weight":
        yield lambda value: torch.cat([value, value.new_zeros(1, value.shape[1])]), lambda value: value[:-1]
    elif other.endswith(".positional_embedding"):
        yield torch.t, torch.t
    elif other.endswith("pos_enc.pe"):
        length = len(value)
        yield lambda table: table[0, :length], _all_positions
    elif own == "scale_logit":
        yield _shifted(-math.log(MAX_SCALE)), _shifted(math.log(MAX_SCALE))


def _by_role(network: nn.Module, own: str, roles: int) -> tuple[Change, Change]:
    """From (head, role) to (role, head), and back."""
    heads = network.get_submodule(own.rpartition(".")[0].rpartition(".")[0]).heads
    assert isinstance(heads, int)
    return functools.partial(swapped, heads, roles), functools.partial(swapped, roles, heads)


def swapped(first: int, second: int, value: Tensor) -> Tensor:
    """Rows by (first, second, rest) → rows by (second, first, rest)."""
    return value.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)


def _all_positions(rows: Tensor) -> Tensor:
    table = sinusoids(POSITIONS, rows.shape[1]).to(rows)
    table[: len(rows)] = rows
    return table.unsqueeze(0)


def sinusoids(length: int, width: int) -> Tensor:
    """[length, width]: positional encodings (Vaswani et al. 2017, §3.5), sines and cosines in turn."""
    rates = torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
    angles = torch.arange(length).float().unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def _shifted(by: float) -> Change:
    return lambda value: (value.double() + by).to(value)


def guided_names(names: Iterable[str]) -> dict[str, str] | None:
    """The names in a checkpoint of Diff-DALLE by those that Guided-Diffusion has for the same; None for another
    layout."""
    names = list(names)
    if _MARK not in names and IMAGES + _MARK not in names:
        return None
    return {name.removeprefix(IMAGES).replace(".attn1.", ".") if TEXTS not in name else name: name for name in names}


def take_weights(weights: Iterable[Weight], state: Mapping[str, Tensor], path: str, whose: str) -> dict[str, Tensor]:
    """The values here of weights in a file; of several with one name here, one after the other.

    whose: the network that they are for, with what its settings are from.

    InputError for a weight too many, too few, of another shape or of whole numbers.
    """
    own: dict[str, Tensor] = {}
    left = dict.fromkeys(state)
    weights = list(weights)
    here, there = Counter(weight.own for weight in weights), Counter(weight.other for weight in weights)
    for weight in weights:
        left.pop(weight.other, None)
        value = state.get(weight.other) if weight.other else torch.empty(0)
        if value is None:
            raise InputError(f"{path} has no {weight.other}, which belongs to {whose}")
        if type(value) is not Tensor or not value.is_floating_point():
            raise InputError(f"{path} has an odd {weight.other}: {short(value)}")
        try:
            part = weight.take(value)
        except (RuntimeError, IndexError):
            part = value
        is_whole = weight.other != "" and here[weight.own] == there[weight.other] == 1
        # take alone may accept a transposed matrix
        if part.shape != weight.shape or (is_whole and value.shape != weight.other_shape):
            raise InputError(f"{path} has {weight.other} of shape {tuple(value.shape)}, which does not fit {whose}")
        own[weight.own] = torch.cat([own[weight.own], part]) if weight.own in own else part
    if left:
        raise InputError(f"{path} has an extra {next(iter(left))}, which does not belong to {whose}")
    return own


def give_weights(weights: Iterable[Weight], network: nn.Module, path: str, project: str) -> dict[str, Tensor]:
    """The weights of a network, from ``path``, as a project's layout has them; several of ours with one name there are
    one after the other. InputError for values that it cannot hold."""
    state, found = network.state_dict(), dict[str, Tensor]()
    for weight in weights:
        value = state[weight.own]
        given = weight.give(value)
        if not weight.other or ".adjust_kv_dim." in weight.other:
            kept = weight.take(given).to(value)
            if not torch.equal(kept, value if weight.other else given):
                raise InputError(
                    f"{path} has values in {weight.own} that the layout of {project} cannot hold: it was trained on, "
                    "or did not come from there"
                )
        if weight.other:
            parts = [found[weight.other], given] if weight.other in found else [given.contiguous()]
            found[weight.other] = torch.cat(parts) if parts[1:] else parts[0]
    return found


def names_table(network: nn.Module, new_order: bool) -> dict[str, Weight]:
    """The weights of a generator's U-Net by their names in Guided-Diffusion; layers that it lacks keep our names."""
    return {each.other: each for each in weights_of(network, False, new_order) if each.own.startswith("unet.")}
