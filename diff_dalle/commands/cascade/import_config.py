"""Settings of ``import_cascade.py``."""

from __future__ import annotations

from collections.abc import Iterator

from ...config import Fault, named, option, settings
from ...config.bounds import MAX_BLOCKS
from ...text.trained_tokens import tokens_option

STAGES = ("stage_a", "semantic", "stage_b", "stage_c", "controlnet", "lora")
ADAPTERS = STAGES[4:]
SAFETENSORS = ".safetensors"


@settings
class ImportConfig:
    """Importing"""

    stage: str = option(
        "semantic",
        "network to write: stage_a, semantic, stage_b, stage_c, or a controlnet or lora for our stage C",
        choices=STAGES,
    )
    model_version: str = option("released", "size of the network, as in the files of train_cascade.py")
    weights: tuple[str, ...] = option(
        (),
        "files of the public networks (.safetensors, .pt), or torchvision's weights of EfficientNetV2-S; several for "
        "one semantic encoder; none = initial values",
    )
    base: str = option("", "checkpoint of the stage C that the adapter was trained for", needs=("stage", *ADAPTERS))
    controlnet_blocks: tuple[int, ...] = option(
        (),
        "residual blocks that the ControlNet steers, as in its training file; none = as published",
        needs=("stage", "controlnet"),
        least=0,
        most=MAX_BLOCKS,
    )
    controlnet_filter: str = option(
        "", "control filter, as in that file; none = as published", needs=("stage", "controlnet")
    )
    controlnet_filter_params: str = option(
        "{}", "parameters of controlnet_filter, as there", nested=True, needs=("controlnet_filter",)
    )
    module_filters: tuple[str, ...] = option(
        (".attn",), "modules that the LoRA adapts, as in its training file", needs=("stage", "lora")
    )
    train_tokens: tuple[str, ...] = tokens_option(needs=("stage", "lora"))
    clip_path: str = option(
        "",
        "CLIP of train_tokens, MODEL/TAG or MODEL/TAG:FILE of open_clip; none = that of base",
        needs=("train_tokens",),
    )
    joint_run: str = option(
        "", "instead: opt….pt of a stage B trained with train_encoder, to take its semantic encoder from"
    )
    out: str = option("", "output file, local or remote; must not exist yet")

    def faults(self) -> Iterator[Fault]:
        unset = ImportConfig.stage, ImportConfig.model_version, ImportConfig.weights
        if self.joint_run and (self.stage, self.model_version, self.weights) != unset:
            others = f"{named('stage')}, {named('model_version')} and {named('weights')}"
            yield Fault("joint_run", f"holds a semantic encoder and its weights: leave out {others}")
        if self.stage in ADAPTERS:
            if not self.base:
                yield Fault("base", "is required: the checkpoint of the stage C that the adapter was trained for")
            if len(self.weights) != 1:
                yield Fault("weights", f"names {len(self.weights)} files, but must name the one of the adapter")
        if self.stage == "lora" and not self.out.endswith(SAFETENSORS):
            yield Fault.of(self, "out", f"a LoRA is written as safetensors: end it with {SAFETENSORS}")
