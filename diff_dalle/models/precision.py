"""Half precision: one autocast, and which parts of a network compute without it."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import torch
from torch import nn

from ..config import InputError
from .options import PRECISIONS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of the precisions that autocast
Module = TypeVar("Module", bound=nn.Module)


def resolve_precision(name: str, device: torch.device) -> str:
    """The precision that ``auto`` stands for: bf16 on GPUs that support it, else fp32."""
    if name == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if name not in PRECISIONS:
        raise InputError(f"precision is {name!r}, but must be one of {', '.join(PRECISIONS)}")
    return name


def training_precision(name: str, device: torch.device) -> str:
    """``resolve_precision``, but in training ``auto`` is bf16 on CPUs with ``has_fast_bf16`` too."""
    return "bf16" if name == "auto" and device.type == "cpu" and has_fast_bf16() else resolve_precision(name, device)


def has_fast_bf16() -> bool:
    """Whether training steps are faster in bf16 than in fp32 on this CPU: it has AMX, or avx512_bf16 and is from AMD.
    False with torch versions that cannot tell.

    Time in bf16 over that in fp32, measured on one thread, for a U-Net of 64 channels at 64 pixels and for training
    with the preset shapes_32 on patches of 2: Intel Xeon with AMX 0.53 and 0.63, AMD EPYC 0.65 and 0.81, but Intel
    Xeon with avx512_bf16 alone 1.40 and 1.35.
    """
    capabilities: dict = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(
        getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        or (capabilities.get("avx512_bf16") and capabilities["cpu_name"].startswith("AMD"))
    )


def autocast(precision: str, device: torch.device):
    """The context of forward passes. Weights, losses and the optimizer stay in fp32."""
    return torch.autocast(device.type, DTYPES[precision]) if precision in DTYPES else contextlib.nullcontext()


def autocast_disabled(device: torch.device) -> contextlib.AbstractContextManager:
    """A context with autocast disabled, for computations that must run in their inputs' dtype."""
    if device.type == "meta":  # which has no autocast
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def full_precision_layers(network: nn.Module) -> set[nn.Module]:
    """The modules of a network that compute without autocast, as their owners' ``full_precision`` names them."""
    return {
        layer
        for module in network.modules()
        for name in getattr(module, "full_precision", ())
        if getattr(module, name) is not None
        for layer in getattr(module, name).modules()
    }


def for_inference(network: Module, precision: str) -> Module:
    """Convert, once, the weights that ``autocast`` converts at every use, because it keeps no copies of frozen ones:
    those of convolutions and linear layers. Returns the network, for use under the same autocast, with the same
    results.

    A module that computes without autocast names such layers in ``full_precision``: they stay as they are, as do norms,
    embeddings and other parameters.
    """
    if precision in DTYPES:
        kept = full_precision_layers(network)
        for module in network.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)) and module not in kept:
                module.to(DTYPES[precision])
    return network
