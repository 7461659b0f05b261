"""The table of training commands: one line for each kind of network that can be trained."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingCommand:
    """script: its path in the checkout. config: its config class, as MODULE.CLASS of this folder. over_base: it trains
    an adapter, whose network is known only with the checkpoint of its base."""

    script: str
    config: str
    over_base: bool = False

    @property
    def config_class(self) -> Any:
        """The subclass of ``training.TrainingRun``. Imported here, so that commands that only ask for the script stay
        quick to start."""
        module, _, name = self.config.rpartition(".")
        return getattr(importlib.import_module(f".{module}", __package__), name)


# By kind. The first is what ``info.py`` describes when nothing says the kind.
TRAINING_COMMANDS = {
    "generator": TrainingCommand("scripts/train_generator.py", "train_generator.GeneratorRun"),
    "classifier": TrainingCommand("scripts/train_classifier.py", "train_classifier.ClassifierRun"),
    "decoder": TrainingCommand("scripts/train_decoder.py", "train_decoder.DecoderRun"),
    "stage_a": TrainingCommand("scripts/train_cascade.py", "cascade.autoencoders.StageARun"),
    "semantic": TrainingCommand("scripts/train_cascade.py", "cascade.autoencoders.SemanticRun"),
    "stage_b": TrainingCommand("scripts/train_cascade.py", "cascade.stages.StageBRun"),
    "stage_c": TrainingCommand("scripts/train_cascade.py", "cascade.stages.StageCRun"),
    "controlnet": TrainingCommand("scripts/train_controlnet.py", "train_controlnet.ControlNetRun", over_base=True),
    "stage_c_controlnet": TrainingCommand(
        "scripts/train_cascade.py", "cascade.controlnet.StageCControlNetRun", over_base=True
    ),
    "generator_lora": TrainingCommand("scripts/train_lora.py", "lora.kinds.GeneratorLora", over_base=True),
    "classifier_lora": TrainingCommand("scripts/train_lora.py", "lora.kinds.ClassifierLora", over_base=True),
    "decoder_lora": TrainingCommand("scripts/train_lora.py", "lora.kinds.DecoderLora", over_base=True),
    "stage_b_lora": TrainingCommand("scripts/train_cascade.py", "lora.kinds.StageBLora", over_base=True),
    "stage_c_lora": TrainingCommand("scripts/train_cascade.py", "lora.kinds.StageCLora", over_base=True),
}
