"""The training commands, by what they train: the kinds of networks, and LoRAs for them."""

from __future__ import annotations

from ..checkpoints.kinds import KINDS, LORA_ENDING, Training

# In the order of ``KINDS``, LoRAs last.
TRAINING_COMMANDS: dict[str, Training] = {
    **{kind: entry.training for kind, entry in KINDS.items() if entry.training},
    **{kind + LORA_ENDING: entry.lora for kind, entry in KINDS.items() if entry.lora},
}
