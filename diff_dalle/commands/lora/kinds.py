"""The kinds of networks that a LoRA can be trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ...config import option
from ...diffusion.parametrization import LOSSES
from ...distributed.world import World
from ...errors import InputError
from ...tasks.latent import LatentTask
from ...text.trained_tokens import find_tokens
from ...training.settings import TrainingConfig
from ..cascade.keys import RENAMED
from ..cascade.released_files import check_imported
from ..cascade.run import CascadeRun
from ..cascade.stages import STAGE_B_SIZES, STAGE_C_SIZES, LatentRun, StageBRun, StageCRun, size_of_base
from ..train_classifier import ClassifierRun
from ..train_decoder import DecoderRun
from ..train_generator import GeneratorRun
from .run import LoraRun


@dataclass(frozen=True)
class NetworkLora(LoraRun):
    """A LoRA of the network in ``model_path``."""

    model_path: str = option(
        "", "checkpoint of the network to adapt, ema_….pt or model….pt, whose settings are taken", free=True
    )

    @property
    def base_path(self) -> str:
        return self.model_path


@dataclass(frozen=True)
class GeneratorLora(NetworkLora, GeneratorRun):
    """Settings of ``train_lora.py`` for a generator."""

    kind: ClassVar[str] = "generator_lora"

    def __post_init__(self):
        if self.prior_target == "base" and LOSSES[self.diffusion.loss_type].is_vb():
            raise InputError(
                f"prior_target is base, but loss_type {self.diffusion.loss_type} compares distributions, not "
                "predictions: set prior_target images, or loss_type rescaled_mse"
            )
        super().__post_init__()


@dataclass(frozen=True)
class ClassifierLora(NetworkLora, ClassifierRun):
    """Settings of ``train_lora.py`` for a classifier."""

    kind: ClassVar[str] = "classifier_lora"

    def __post_init__(self):
        if self.prior_data_dir:
            raise InputError("prior_data_dir is set, but a contrastive loss has no weights of samples: leave it out")
        super().__post_init__()


@dataclass(frozen=True)
class DecoderLora(NetworkLora, DecoderRun):
    """Settings of ``train_lora.py`` for U-Nets of a decoder."""

    kind: ClassVar[str] = "decoder_lora"

    def __post_init__(self):
        if self.prior_data_dir:
            raise InputError("prior_data_dir is set, but decoders are trained without such images: leave it out")
        if self.check:
            raise InputError("check is set, but it describes the training of whole decoders: leave it out")
        super().__post_init__()

    def adapted_names(self) -> tuple[str, ...]:
        return tuple(self.decoder.names[i] for i in self.trained)


@dataclass(frozen=True)
class CascadeLora(LoraRun, LatentRun):
    """A LoRA of a stage of a latent cascade, by the documented keys."""

    base_setting: ClassVar[str] = "generator_checkpoint_path"
    renamed: ClassVar[Mapping[str, str]] = {**RENAMED, "init_checkpoint": "lora_checkpoint_path"}

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        check_imported(cls.kind, tree)  # before the base's settings are read
        return super().completed(tree)

    def check_world(self, world: World) -> None:
        super().check_world(world)
        if self.prior_data_dir:
            self.check_halves(self.batch_size, world.size)  # which the processes divide among them

    @property
    def base_path(self) -> str:
        return self.generator_checkpoint_path or ""

    def settled(self, world: World) -> CascadeRun:
        run = super().settled(world)
        if self.specs and self._encodes_outside:
            clip = run._opened.text_clip
            embedding = clip.take_tokens(find_tokens(clip.tokenizer, self.specs))
            object.__setattr__(run, "outside", embedding.lent())
        return run

    def build_task(self, model: nn.Module) -> LatentTask:
        task = super().build_task(model)  # type: ignore[safe-super]  # the stage's
        task.trains_conditions = task.trains_conditions or self.outside is not None
        return task

    @property
    def token_clip(self) -> str:
        clip = self.trained_with.text_clip
        return clip.identity if clip and self.train_tokens else ""

    @property
    def training(self) -> TrainingConfig:  # type: ignore[override]
        return replace(super().training, init_checkpoint=())  # generator_checkpoint_path is the base


@dataclass(frozen=True)
class StageBLora(CascadeLora, StageBRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_b_lora``."""

    kind: ClassVar[str] = "stage_b_lora"

    model_version: str | None = size_of_base(STAGE_B_SIZES)  # type: ignore[assignment]


@dataclass(frozen=True)
class StageCLora(CascadeLora, StageCRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_c_lora``."""

    kind: ClassVar[str] = "stage_c_lora"

    model_version: str | None = size_of_base(STAGE_C_SIZES)  # type: ignore[assignment]
