"""Settings of all commands that use LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config import Fault, InputError, named, option


def lora_option() -> Any:
    """The setting ``lora`` of every command that uses LoRAs."""
    return option((), "LoRA files of the networks, each with a factor if it is not 1: a.safetensors:0.8,b.safetensors")


def accept_option() -> Any:
    """The setting ``accept_changed_base`` of every command that uses LoRAs or ControlNets."""
    return option(False, "use an adapter although it was trained for a network with other weights")


def check_accepted(accepted: bool, lora: Sequence[str], controlnet: str) -> None:
    """InputError for ``accept_changed_base`` without an adapter."""
    if accepted and not lora and not controlnet:
        rule = (
            f"has no effect while {named('lora')} and {named('controlnet')} are none: set one of them, or leave it out"
        )
        raise InputError(Fault("accept_changed_base", rule))
