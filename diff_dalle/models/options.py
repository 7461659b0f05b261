"""Settings that networks have in common."""

from __future__ import annotations

from typing import Any

from ..config import option
from ..config.bounds import MAX_BLOCKS, MAX_WIDTH

PRECISIONS = ("auto", "fp32", "bf16", "fp16")  # ``precision.py`` says what they do


def width_option(default: Any, help: str, least: int = 1, **rules: Any) -> Any:
    """A number of channels, heads or tokens, or a list of them. rules: see ``option``."""
    return option(default, help, least=least, most=MAX_WIDTH, **rules)


def blocks_option(default: Any, help: str, least: int = 1, **rules: Any) -> Any:
    """A number of blocks, one after the other, or a list of them. rules: see ``option``."""
    return option(default, help, least=least, most=MAX_BLOCKS, **rules)


def text_length_option() -> Any:
    """The setting ``text_length`` of every network with a text encoder."""
    return option(
        48, "maximum caption length in tokens, start and end tokens included; longer captions are truncated", least=1
    )
