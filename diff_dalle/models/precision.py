"""Which parts of a network compute in which precision."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def autocast_disabled(device: torch.device) -> contextlib.AbstractContextManager:
    """A context with autocast disabled, for computations that must run in their inputs' dtype."""
    if not torch.amp.is_autocast_available(device.type):  # the meta device
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def cast_weights(network: Module, dtype: torch.dtype) -> Module:
    """Convert, once, the weights that autocast to ``dtype`` converts at every use, because it keeps no copies of frozen
    ones: those of convolutions and linear layers. Returns the network, for use under the same autocast, with the same
    results.

    A module that computes without autocast names such layers in ``full_precision``: they stay as they are, as do norms,
    embeddings and other parameters.
    """
    kept = {
        layer
        for module in network.modules()
        for name in getattr(module, "full_precision", ())
        if getattr(module, name) is not None
        for layer in getattr(module, name).modules()
    }
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and module not in kept:
            module.to(dtype)
    return network
