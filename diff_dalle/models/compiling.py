"""Training with torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..capturing import mark_constants


def compile_training(network: nn.Module, backend: str = "inductor") -> None:
    """Compile a network's forward passes, each as one graph, for training mode; they are compiled at their first calls.
    Of a task, the graph also has its random numbers and losses.

    Evaluation and previews, whose sizes and conditions differ, run as before: compiling them for each would take longer
    than running them.

    A network that is called by other methods than ``forward`` names them in ``entry_points``. A pass that cannot be
    captured as one graph raises torch's error, which says where it breaks.
    """
    mark_constants()
    for name in getattr(network, "entry_points", ("forward",)):
        setattr(network, name, _compiled_in_training(network, getattr(network, name), backend))


def _compiled_in_training(network: nn.Module, plain: Callable, backend: str) -> Callable:
    compiled = torch.compile(plain, backend=backend, fullgraph=True)

    def method(*args: Any, **kwargs: Any) -> Any:
        return (compiled if network.training else plain)(*args, **kwargs)

    return method
