"""Low-rank adaptation (Hu et al. 2021): W + alpha / rank · up · down, of weights that stay as they are.

A weight [out, in, …] is adapted as the matrix [out, in · …]: those of linear layers, fused ones (queries, keys and
values in one) among them, and of convolutions of every kernel, depthwise ones included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...config import Fault, InputError, nearest
from ..precision import autocast_disabled

ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.MultiheadAttention)
DOWN, UP = "lora_down", "lora_up"
RECIPES = ("standard", "published")


class LowRank(nn.Module):
    """A parametrization: weight → weight + scale · up · down, in fp32 whatever the weight's dtype is. The identity at
    initialization: up is 0, and down as the weight of a linear layer (standard); or down is 0, and up N(0, 1), as in
    Stable Cascade's training (published).

    enabled: where False, the weight stays as it is.
    """

    enabled = True

    def __init__(self, shape: Sequence[int], rank: int, alpha: float, recipe: str = RECIPES[0]):
        super().__init__()
        columns = math.prod(shape[1:])
        self.scale = alpha / rank
        self.lora_down = nn.Parameter(torch.zeros(rank, columns, dtype=torch.float32))
        self.lora_up = nn.Parameter(torch.zeros(shape[0], rank, dtype=torch.float32))
        if recipe == "published":
            nn.init.normal_(self.lora_up)
        else:
            bound = columns**-0.5
            nn.init.uniform_(self.lora_down, -bound, bound)

    def forward(self, weight: Tensor) -> Tensor:
        if not self.enabled:
            return weight
        with autocast_disabled(weight.device):
            change = product(self.lora_down, self.lora_up, self.scale)
            return (weight.float() + change.view(weight.shape)).to(weight.dtype)


def product(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """scale · up · down, [out, in · …]."""
    return (up * scale) @ down


def adaptable(network: nn.Module) -> dict[str, str]:
    """The modules that have a weight to adapt: dotted name → name of the parameter."""
    found = {}
    for name, module in network.named_modules():
        if isinstance(module, ADAPTABLE):
            fused = isinstance(module, nn.MultiheadAttention)
            parameter = "in_proj_weight" if fused else "weight"
            if getattr(module, parameter) is not None:  # a MultiheadAttention may have three separate ones
                found[name] = parameter
    return found


def select_modules(network: nn.Module, filters: Sequence[str]) -> list[str]:
    """The adaptable modules whose dotted names contain one of the ``filters``. InputError for a filter that none of
    them contains, with the nearest name that there is."""
    names = list(adaptable(network))
    for text in filters:
        if not any(text in name for name in names):
            parts = {part for name in names for part in name.split(".")}
            begin = "." if text.startswith(".") else ""
            hint = nearest(text, sorted(begin + part for part in parts if not part.isdigit()))
            rule = (
                f"has {text!r}, but no linear layer or convolution of the network has that in its name{hint} "
                f"(names look like {names[len(names) // 2] if names else 'none'})"
            )
            raise InputError(Fault("module_filters", rule))
    return [name for name in names if any(text in name for text in filters)]


def add_low_rank(
    network: nn.Module, filters: Sequence[str], rank: int, alpha: float, recipe: str = RECIPES[0]
) -> dict[str, LowRank]:
    """Adapt the selected modules of a network, which then computes with the adapted weights. Returns the
    parametrizations by the modules' names."""
    names, pairs = adaptable(network), {}
    for name in select_modules(network, filters):
        module, parameter = network.get_submodule(name), names[name]
        weight = getattr(module, parameter)
        pairs[name] = LowRank(weight.shape, rank, alpha, recipe).to(weight.device)
        parametrize.register_parametrization(module, parameter, pairs[name], unsafe=True)  # nothing to check
    return pairs


@torch.no_grad()
def merge_low_rank(network: nn.Module, pairs: Mapping[str, Tensor], scale: float) -> None:
    """Add scale · up · down to the weights, which ``-scale`` takes away again, both up to rounding.

    pairs: ``MODULE.lora_down`` and ``MODULE.lora_up``. InputError for modules that the network does not have, and for
    other shapes.
    """
    names = adaptable(network)
    for name in sorted({key.rpartition(".")[0] for key in pairs}):
        down, up = pairs.get(f"{name}.{DOWN}"), pairs.get(f"{name}.{UP}")
        if name not in names or down is None or up is None:
            raise InputError(f"the LoRA does not fit this network: it adapts {name}{nearest(name, names)}")
        weight = getattr(network.get_submodule(name), names[name])
        rows, columns = weight.shape[0], math.prod(weight.shape[1:])
        if down.ndim != 2 or up.ndim != 2 or (len(up), up.shape[1], down.shape[1]) != (rows, len(down), columns):
            raise InputError(
                f"the LoRA does not fit this network: for the weight {rows}×{columns} of {name} it has "
                f"{tuple(up.shape)} times {tuple(down.shape)}"
            )
        change = product(down.to(weight.device).float(), up.to(weight.device).float(), scale)
        weight.copy_(weight.float() + change.view(weight.shape))
