"""torch.compile of a network's blocks in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from . import kernels
from .adapters.adapted import Adapted
from .units import BLOCKS

GRAPHS = 256  # of a kind of block: one for each shape, with and without gradient


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
    if isinstance(network, BLOCKS):
        yield network
    else:
        for child in network.children():
            yield from _outermost(child)


def _run(block: nn.Module, plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A frozen block is in evaluation mode, but has to pass gradients on."""
    run = compiled if block.training or torch.is_grad_enabled() else plain
    return run(block, *args, **kwargs)
