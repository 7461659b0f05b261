"""Which parts of a network are gathered together when its weights are sharded over processes, and compiled together.

Both are the modules whose class says ``is_block``; what is left of the network is gathered as a whole. A network can be
sharded if its class has ``entries``: the methods beside ``forward`` by which others run it. None of them may be called
inside ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config import InputError, named
from ..distributed.parallel import Parts
from . import kernels
from .adapters.lora import Adapted
from .precision import full_precision_layers

GRAPHS = 256  # of a kind of block: one for each shape, with and without gradient


def _is_block(module: nn.Module) -> bool:
    return getattr(module, "is_block", False)


def parts_of(network: nn.Module, half: torch.dtype | None) -> Parts:
    """A network's modules as they are gathered. half: the dtype of autocast, None without it. InputError for a network
    that cannot be sharded.

    Autocast computes the same from weights that are gathered in its dtype, except in the layers that it spares, and in
    those whose class says ``in_fp32``.
    """
    entries = getattr(type(network), "entries", None)
    if entries is None:
        raise InputError(
            f"a {type(network).__name__} is not made of blocks that can be gathered one by one, so its weights cannot "
            f"be sharded: set {named('parallel')} ddp, with which each process has all of them"
        )
    full = full_precision_layers(network) | {each for each in network.modules() if getattr(each, "in_fp32", False)}
    return Parts([each for each in network.modules() if _is_block(each)], full, entries, half)


def is_compiled(setting: bool | None, device: torch.device) -> bool:
    """Whether networks are compiled on a device where the setting says so; None = on CUDA, if Triton is there."""
    return kernels.run_on(device) if setting is None else setting


def compile_training(network: nn.Module, backend: str = "inductor", dynamic: bool | None = False) -> None:
    """Compile the forward passes of a network's blocks, each as one graph, at their first calls in training. Blocks of
    one kind that differ in their weights only share a graph.

    dynamic: as of ``torch.compile``; None where the sizes of images vary.

    Evaluation and previews, whose sizes and conditions differ, run as before: compiling them for each would take longer
    than running them. A block that cannot be captured as one graph raises torch's error, which says where it breaks.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = GRAPHS
    compiled: dict[type[nn.Module], Callable[..., Any]] = {}
    for block in _outermost(network.base if isinstance(network, Adapted) else network):
        kind = type(block)
        if kind not in compiled:
            compiled[kind] = torch.compile(kind.forward, backend=backend, fullgraph=True, dynamic=dynamic)
        block.forward = partial(_run, block, kind.forward, compiled[kind])


def _outermost(network: nn.Module) -> Iterator[nn.Module]:
    if _is_block(network):
        yield network
    else:
        for child in network.children():
            yield from _outermost(child)


def _run(block: nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A frozen block is in evaluation mode, but has to pass gradients on."""
    run = compiled if block.training or torch.is_grad_enabled() else plain
    return run(block, *args, **kwargs)
