"""Where a step's first value that is not finite appears."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import Batch
from .task import Task


class NonFinite:
    """The first finding of a search in order of computation; ``place`` is "" until there is one."""

    def __init__(self) -> None:
        self.place = ""

    def look(self, value: Any, place: str) -> None:
        """Search a tensor, or tensors in lists and dicts."""
        if not self.place and _is_bad(value):
            self.place = place


def _is_bad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and not bool(value.isfinite().all())
    if isinstance(value, Mapping):
        return any(map(_is_bad, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_is_bad, value))


@contextlib.contextmanager
def search_non_finite(task: Task, batches: Sequence[Batch]) -> Iterator[NonFinite]:
    """Search the samples, the weights, and what is computed from them inside the block: the output of each module and
    the gradient of each parameter. Every value is waited for, so it is slow."""
    found = NonFinite()
    for batch in batches:
        for name, value in (("image", batch.images), *batch.cond.present().items()):
            rows = [] if not _is_bad(value) else _bad_rows(value, batch.index)
            found.look(value, f"the samples: {name} at position {', '.join(map(str, rows[:8]))}")
    for name, parameter in task.named_parameters():
        found.look(parameter, f"the weights before the step: {name}")

    def output_of(name: str, module: nn.Module):
        # The losses, which are the task's own output, have NaN where a value does not apply to a sample.
        place = f"the forward pass: the output of {name or 'the task'} ({type(module).__name__})"
        return lambda _, __, output: found.look(output if module is not task else output.get("loss"), place)

    def gradient_of(name: str):
        return lambda gradient: found.look(gradient, f"the backward pass: the gradient of {name}")

    handles = [module.register_forward_hook(output_of(name, module)) for name, module in task.named_modules()]
    handles += [p.register_hook(gradient_of(name)) for name, p in task.named_parameters() if p.requires_grad]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _bad_rows(value: Tensor, index: Tensor) -> list[int]:
    finite = value.isfinite().flatten(1).all(1) if value.ndim > 1 else value.isfinite()
    return index[torch.nonzero(~finite.cpu())[:, 0]].tolist()
