"""Settings of all commands that use LoRAs."""

from __future__ import annotations

from typing import Any

from ..config import option


def lora_option() -> Any:
    """The setting ``lora`` of every command that uses LoRAs."""
    return option((), "LoRA files of the networks, each with a factor if it is not 1: a.safetensors:0.8,b.safetensors")


def accept_option() -> Any:
    """The setting ``accept_changed_base`` of every command that uses LoRAs or ControlNets."""
    return option(False, "use an adapter although it was trained for a network with other weights")
