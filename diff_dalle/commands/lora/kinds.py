"""The kinds of networks that a LoRA can be trained for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from ...config import option, settings
from ...diffusion.parametrization import LOSSES
from ...distributed.world import World
from ...errors import Fault, InputError, named
from ...tasks.latent import LatentTask
from ...text.trained_tokens import find_tokens
from ...training.settings import TrainingConfig
from ..cascade.released_files import check_imported
from ..cascade.run import CascadeRun
from ..cascade.sections import RENAMED
from ..cascade.stages import STAGE_B_SIZES, STAGE_C_SIZES, LatentRun, StageBRun, StageCRun, size_of_base
from ..train_classifier import ClassifierRun
from ..train_decoder import DecoderRun
from ..train_generator import GeneratorRun
from .run import LoraRun


@settings
class NetworkLora(LoraRun):
    """A LoRA of the network in ``model_path``."""

    model_path: str = option(
        "", "checkpoint of the network to adapt, ema_….pt or model….pt, whose settings are taken", free=True
    )

    @property
    def base_path(self) -> str:
        return self.model_path


@settings
class GeneratorLora(NetworkLora, GeneratorRun):
    """Settings of ``train_lora.py`` for a generator."""

    kind: ClassVar[str] = "generator_lora"

    def faults(self) -> Iterator[Fault]:
        if self.prior_target == "base" and LOSSES[self.diffusion.loss_type].is_vb():
            loss = f"{named('loss_type')} {self.diffusion.loss_type}"
            rule = f"{loss} compares distributions, not predictions: set it to images, or the loss to rescaled_mse"
            yield Fault("prior_target", f"is base, but {rule}")
        yield from super().faults()


@settings
class ClassifierLora(NetworkLora, ClassifierRun):
    """Settings of ``train_lora.py`` for a classifier."""

    kind: ClassVar[str] = "classifier_lora"

    def faults(self) -> Iterator[Fault]:
        if self.prior_data_dir:
            rule = "is set, but a contrastive loss has no weights of samples: leave it out"
            yield Fault("prior_data_dir", rule)
        yield from super().faults()


@settings
class DecoderLora(NetworkLora, DecoderRun):
    """Settings of ``train_lora.py`` for U-Nets of a decoder."""

    kind: ClassVar[str] = "decoder_lora"

    def faults(self) -> Iterator[Fault]:
        if self.prior_data_dir:
            yield Fault("prior_data_dir", "is set, but decoders are trained without such images: leave it out")
        if self.check:
            yield Fault("check", "is set, but it describes the training of whole decoders: leave it out")
        yield from super().faults()

    def adapted_names(self) -> tuple[str, ...]:
        return tuple(self.decoder.names[i] for i in self.trained)


@settings
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
            InputError.check(self.wrong_halves(self.batch_size, world.size))  # which the processes divide

    @property
    def base_path(self) -> str:
        return self.generator_checkpoint_path or ""

    def settled(self, world: World) -> CascadeRun:
        run = super().settled(world)
        if self.specs and self._encodes_outside:
            clip = run._opened.text_clip
            embedding = clip.take_tokens(find_tokens(clip.tokenizer, self.specs))
            return run.holding(outside=embedding.lent())
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


@settings
class StageBLora(CascadeLora, StageBRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_b_lora``."""

    kind: ClassVar[str] = "stage_b_lora"

    model_version: str | None = size_of_base(STAGE_B_SIZES)  # type: ignore[assignment]


@settings
class StageCLora(CascadeLora, StageCRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_c_lora``."""

    kind: ClassVar[str] = "stage_c_lora"

    model_version: str | None = size_of_base(STAGE_C_SIZES)  # type: ignore[assignment]
