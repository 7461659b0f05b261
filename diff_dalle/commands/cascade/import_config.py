"""Settings of ``import_cascade.py``."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Fault, named, option, settings

STAGES = ("stage_a", "semantic", "stage_b", "stage_c")


@settings
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

    def faults(self) -> Iterator[Fault]:
        unset = ImportConfig.stage, ImportConfig.model_version, ImportConfig.weights
        if self.joint_run and (self.stage, self.model_version, self.weights) != unset:
            others = f"{named('stage')}, {named('model_version')} and {named('weights')}"
            yield Fault("joint_run", f"holds a semantic encoder and its weights: leave out {others}")
