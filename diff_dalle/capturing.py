"""What torch.compile needs to know of functions that it cannot capture.

Kept here as a list, because torch's own mark imports its compiler, which takes as long as importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_CONSTANT: list[Callable[..., Any]] = []


def constant_in_graphs(function: Function) -> Function:
    """Mark a function whose result, a number or a tensor, depends on its arguments only, and these on no step: a graph
    holds the result."""
    _CONSTANT.append(function)
    return function


def mark_constants() -> None:
    """Tell torch.compile of all marked functions."""
    import torch

    for function in _CONSTANT:
        torch.compiler.assume_constant_result(function)
