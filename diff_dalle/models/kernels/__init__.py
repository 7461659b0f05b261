"""Triton kernels, which compute on CUDA what takes torch many passes over its operands."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def run_on(device: torch.device) -> bool:
    """Whether the kernels run on a device: on CUDA, where Triton is installed, as it is with torch's CUDA builds."""
    return device.type == "cuda" and find_spec("triton") is not None
