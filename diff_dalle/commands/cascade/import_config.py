"""Settings of ``import_cascade.py``."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import option
from ...errors import InputError

STAGES = ("stage_a", "semantic", "stage_b", "stage_c")


@dataclass(frozen=True)
class ImportConfig:
    """Importing"""

    stage: str = option("semantic", "what to write: stage_a, semantic, stage_b or stage_c", choices=STAGES)
    model_version: str = option("released", "size of the network, as in the files of train_cascade.py")
    weights: tuple[str, ...] = option(
        (),
        "files of the public networks (.safetensors, .pt), or torchvision's weights of EfficientNetV2-S; several for "
        "one semantic encoder; none = initial values",
    )
    joint_run: str = option(
        "", "instead: an opt….pt of a stage B that was trained with train_encoder, whose semantic encoder is taken"
    )
    out: str = option("", "file to write, local or remote; it must not exist")

    def __post_init__(self):
        unset = ImportConfig.stage, ImportConfig.model_version, ImportConfig.weights
        if self.joint_run and (self.stage, self.model_version, self.weights) != unset:
            raise InputError(
                "joint_run holds a semantic encoder and its weights: leave out stage, model_version and weights"
            )
