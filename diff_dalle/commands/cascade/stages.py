"""Training stages B and C of a latent cascade, which denoise latents of frozen networks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from ...checkpoints.cascade import LatentSampling, StageBDiffusion, StageBSampling, TrainedWith
from ...checkpoints.decoder import CLIP_OUTPUTS
from ...config import option, section, settings
from ...data.loader import Loader
from ...data.spec import CaptionSpec, ImageSpec, SampleSpec
from ...diffusion.log_snr import LogSnrProcess
from ...diffusion.log_snr_config import LogSnrConfig
from ...distributed.world import World
from ...embeddings.contract import Clip
from ...errors import Fault, InputError, named
from ...images.signal import LatentSignal
from ...models.latent.config import LatentUnetConfig
from ...models.latent.semantic import SemanticAutoencoder
from ...models.latent.stage_a import StageA
from ...models.latent.stage_b import STAGE_B_SIZES, StageB, StageBConfig
from ...models.latent.stage_c import STAGE_C_SIZES, StageC, StageCConfig
from ...tasks.joint import JointStageBTask
from ...tasks.latent import (
    IMAGE_CLIP,
    SEMANTIC,
    STAGE_A,
    TEXT_CLIP,
    LatentTask,
    StageBTask,
    StageBTaskConfig,
    StageCTask,
    StageCTaskConfig,
)
from ...tasks.latent_previews import LatentPreviews
from ...text.tokenizer import Tokenizer, TokenizerConfig
from ...training.trainee import Trainee
from ..training import check_same
from .companions import (
    check_channels,
    check_image_clip,
    check_text_clip,
    identity_of,
    load_semantic,
    load_stage_a,
    open_clip,
    outputs_of_clips,
)
from .run import CascadeRun

TEXT_NAME = "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"
IMAGE_NAME = "openai/clip-vit-large-patch14"


@dataclass(frozen=True)
class Opened:
    """The frozen networks of a run.

    previewer: decodes semantic latents in stage C's previews.
    """

    semantic: SemanticAutoencoder
    stage_a: StageA | None = None
    previewer: SemanticAutoencoder | None = None
    text_clip: Clip | None = None
    image_clip: Clip | None = None


@settings
class LatentRun(CascadeRun):
    """Settings of stages B and C; a kind adds ``model``, ``diffusion``, ``denoising`` and ``sampling``."""

    if TYPE_CHECKING:
        model: LatentUnetConfig = section(LatentUnetConfig)
        diffusion: LogSnrConfig = section(LogSnrConfig)
        sampling: LatentSampling = section(LatentSampling)

    opened: ClassVar[Opened | None] = None  # of the instance that ``settled`` returns

    adaptive_loss_weight: bool | None = option(
        None, "weigh the loss by 1 / its running value at that log-SNR; False = p2; none = diffusion.loss_weighting"
    )
    effnet_checkpoint_path: str = option(
        "", "checkpoint of the semantic encoder (kind: semantic)", required=True, free=True
    )
    clip_text_model_name: str | None = option(
        None,
        "CLIP that encodes captions: a checkpoint of train_classifier.py, MODEL/TAG of open_clip or a documented name; "
        f"none = {TEXT_NAME}, unless the network encodes text itself or reads none",
        free=True,
    )
    clip_outputs: str | None = option(
        None,
        "what of a CLIP is read: unit = embeddings of norm 1, states after the last norm, zeros at padding; released = "
        "as the released networks read them; none = as generator_checkpoint_path was trained, else unit",
        choices=CLIP_OUTPUTS,
    )
    tokenizer: TokenizerConfig = section(TokenizerConfig, flags=False)
    trained_with: TrainedWith = section(TrainedWith, flags=False)

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        completed = super().completed(tree)
        if isinstance(completed.get("adaptive_loss_weight"), bool):
            weighting = "adaptive" if completed["adaptive_loss_weight"] else "p2"
            _complete(completed, "loss_weighting", [weighting])
        return completed

    def faults(self) -> Iterator[Fault]:
        vars(self).update(trained_with=replace(self.trained_with, image_size=self.image_size))
        yield from super().faults()
        adaptive, weighting = self.adaptive_loss_weight, self.diffusion.loss_weighting
        if adaptive is not None and weighting != (("adaptive",) if adaptive else ("p2",)):
            rule = f"{named('diffusion.loss_weighting')} is {', '.join(weighting)}: leave one of them out"
            yield Fault.of(self, "adaptive_loss_weight", rule)
        if self.clip_text_model_name and not self._encodes_outside:
            what = "encodes text itself" if self.has_text else "reads no text"
            yield Fault("clip_text_model_name", f"is given, but the network {what}: leave it out")

    # ------------------------------------------------------------------------------------------------ what a kind says

    @abstractmethod
    def opened_for(self, device: torch.device) -> Opened:
        """The frozen networks, without CLIPs. InputError for those that are not there or do not fit."""

    @abstractmethod
    def build_task(self, model: nn.Module) -> LatentTask:
        """The task, without previews."""

    # ------------------------------------------------------------------------------------------------------------- text

    @property
    def text_length(self) -> int:
        return self.model.text.text_length

    @property
    def has_text(self) -> bool:
        return self.model.text.enc_attn_dim > 0

    @property
    def _encodes_outside(self) -> bool:
        """Whether a CLIP encodes the captions."""
        return not self.has_text and bool(self.model.states_width or self.model.vector_width)

    def sample_spec(self, tokenizer: Tokenizer | None) -> SampleSpec:
        image, clip = ImageSpec((self.image_size, self.image_size)), self._opened.text_clip
        if clip is not None:
            return SampleSpec(image, (CaptionSpec(clip.tokenize, clip.text_length),))
        return SampleSpec(image, (CaptionSpec(tokenizer, self.text_length),) if tokenizer else ())

    # ---------------------------------------------------------------------------------------------- what it works with

    @property
    def trains_encoder(self) -> bool:
        """Whether the semantic encoder is trained along."""
        return False

    @property
    def _opened(self) -> Opened:
        assert self.opened is not None  # ``settled`` comes first
        return self.opened

    def settled(self, world: World) -> CascadeRun:
        opened, known = self.opened_for(world.device), self.trained_with
        frozen = {"semantic": (opened.semantic, "effnet_checkpoint_path")}
        if opened.stage_a is not None:
            frozen["stage_a"] = opened.stage_a, "stage_a_checkpoint_path"  # type: ignore[assignment]
        for name, (network, setting) in frozen.items():
            identity = ""
            if name != "semantic" or not self.trains_encoder:  # else nobody knows yet what it will be
                identity = identity_of(network)
                check_same(identity, getattr(known, name), setting, getattr(self, setting))
            known = replace(known, **cast(Any, {name: identity, f"{name}_stride": network.config.stride}))
        if self.trains_encoder:
            known = replace(known, encoder=opened.semantic.config)
        outputs = self.clip_outputs or outputs_of_clips(self.generator_checkpoint_path)
        if self._encodes_outside:
            name = self.clip_text_model_name or TEXT_NAME
            clip, recorded = open_clip(name, outputs, known.text_clip, "clip_text_model_name", world.device)
            check_text_clip(clip, self.model)
            opened, known = replace(opened, text_clip=clip), replace(known, text_clip=recorded)
        if self.image_clip_name:
            name, setting = self.image_clip_name, "clip_image_model_name"
            clip, recorded = open_clip(name, outputs, known.image_clip, setting, world.device)
            check_image_clip(clip, self.model)
            opened, known = replace(opened, image_clip=clip), replace(known, image_clip=recorded)
        run = super().settled(world).holding(trained_with=known, opened=opened)
        InputError.check(run.wrong_sizes(run.size_multiple))
        return run

    @property
    def image_clip_name(self) -> str | None:
        """The CLIP of the images; None = none is used."""
        return None

    @property
    def size_multiple(self) -> int:
        if self.opened is None:  # the strides are not known yet
            return 0
        return math.lcm(self.trained_with.semantic_stride, self.signal.scale * self.model.patch_size)

    @property
    @abstractmethod
    def signal(self) -> LatentSignal:
        """What is denoised."""

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        task, opened = self.build_task(self.build_model(tokenizer, world)), self._opened
        networks = {
            STAGE_A: opened.stage_a,
            SEMANTIC: opened.semantic,
            TEXT_CLIP: opened.text_clip,
            IMAGE_CLIP: opened.image_clip,
        }
        trained = set(task.modules())
        for name, network in networks.items():
            if network is not None and network not in trained:
                task.add_companion(name, network)
        if self.sample_interval:
            count = self.loop.preview_samples
            batch = replace(shown.first(count), index=torch.arange(count))
            captions, size = shown.first_captions(count), self.training.microbatch
            task.preview = LatentPreviews(batch, captions, self.signal, self.sampling, size)
        return [Trainee(task, self.optim, self.training.precision, world)]


@settings
class StageBRun(LatentRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_b``."""

    kind: ClassVar[str] = "stage_b"
    sizes: ClassVar[Mapping[str, Any]] = STAGE_B_SIZES

    model_version: str = option(
        "3B", "size of the network, which model may change", choices=STAGE_B_SIZES, required=True
    )
    stage_a_checkpoint_path: str = option("", "checkpoint of stage A (kind: stage_a)", required=True, free=True)
    train_encoder: bool = option(
        False,
        "train the semantic encoder along, from the weights of effnet_checkpoint_path; import_cascade.py then makes a "
        "checkpoint of it, for stage C and for sampling",
    )
    shift: float | None = option(
        None, "sets diffusion.shift: above 1 = more noise, for larger images, in training and sampling; none = 1"
    )
    model: StageBConfig = section(StageBConfig, flags=False)
    diffusion: StageBDiffusion = section(StageBDiffusion, flags=False)
    denoising: StageBTaskConfig = section(StageBTaskConfig, flags=False)
    sampling: StageBSampling = section(StageBSampling, flags=False)

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        completed = super().completed(tree)
        if completed.get("shift") is not None:
            _complete(completed, "shift", completed["shift"])
        return completed

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.shift is not None and self.shift != self.diffusion.shift:
            rule = f"{named('diffusion.shift')} is {self.diffusion.shift:g}: leave one of them out"
            yield Fault.of(self, "shift", rule)

    def opened_for(self, device: torch.device) -> Opened:
        semantic = load_semantic(self.effnet_checkpoint_path, device)
        stage_a = load_stage_a(self.stage_a_checkpoint_path, device)
        model, channels = self.model, semantic.config.semantic_channels
        check_channels("model.channels", model.channels, stage_a.config.latent_channels, "stage A")
        check_channels("model.semantic_channels", model.semantic_channels, channels, "the semantic encoder")
        return Opened(semantic, stage_a)

    @property
    def signal(self) -> LatentSignal:
        stage_a = cast(StageA, self._opened.stage_a)
        return LatentSignal(
            self.model.channels, self.trained_with.stage_a_stride, "stage A", stage_a.encode, stage_a.decode
        )

    @property
    def trains_encoder(self) -> bool:
        return self.train_encoder

    def build_task(self, model: nn.Module) -> LatentTask:
        given = cast(StageB, model), LogSnrProcess(self.diffusion), self.denoising
        return JointStageBTask(*given, self._opened.semantic) if self.train_encoder else StageBTask(*given)


@settings
class StageCRun(LatentRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_c``."""

    kind: ClassVar[str] = "stage_c"
    sizes: ClassVar[Mapping[str, Any]] = STAGE_C_SIZES

    model_version: str = option(
        "3.6B", "size of the network, which model may change", choices=STAGE_C_SIZES, required=True
    )
    previewer_checkpoint_path: str | None = option(
        None, "checkpoint of the previewer (kind: semantic); none = effnet_checkpoint_path", free=True
    )
    clip_image_model_name: str | None = option(
        None,
        "CLIP that makes image embeddings, as clip_text_model_name; "
        f"none = {IMAGE_NAME}, unless model.image_width is 0",
        free=True,
    )
    model: StageCConfig = section(StageCConfig, flags=False)
    diffusion: LogSnrConfig = section(LogSnrConfig, flags=False)
    denoising: StageCTaskConfig = section(StageCTaskConfig, flags=False)
    sampling: LatentSampling = section(LatentSampling, flags=False)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.clip_image_model_name and not self.model.image_width:
            rule = f"is given, but {named('model.image_width')} is 0: leave it out, or set the width"
            yield Fault("clip_image_model_name", rule)

    @property
    def image_clip_name(self) -> str | None:
        return (self.clip_image_model_name or IMAGE_NAME) if self.model.image_width else None

    def opened_for(self, device: torch.device) -> Opened:
        semantic = load_semantic(self.effnet_checkpoint_path, device)
        path = self.previewer_checkpoint_path
        previewer = load_semantic(path, device) if path else semantic
        channels = semantic.config.semantic_channels
        check_channels("model.channels", self.model.channels, channels, "the semantic encoder")
        if previewer.config.semantic_channels != channels:
            found = f"is {path}, which decodes latents of {previewer.config.semantic_channels} channels"
            rule = f"{found}, but those of the semantic encoder have {channels}: give its own previewer"
            raise InputError(Fault("previewer_checkpoint_path", rule))
        return Opened(semantic, previewer=previewer)

    @property
    def signal(self) -> LatentSignal:
        opened, previewer = self._opened, cast(SemanticAutoencoder, self._opened.previewer)
        stride = self.trained_with.semantic_stride
        return LatentSignal(self.model.channels, stride, "a previewer", opened.semantic.encode, previewer.preview)

    def build_task(self, model: nn.Module) -> LatentTask:
        return StageCTask(cast(StageC, model), LogSnrProcess(self.diffusion), self.denoising)


def size_of_base(sizes: Mapping[str, Any]) -> Any:
    """The setting ``model_version`` of what is trained over a base."""
    return option(None, "size of the base; none = whatever it has", choices=tuple(sizes))


def _complete(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set ``diffusion.NAME`` unless the file does."""
    if isinstance(tree.setdefault("diffusion", {}), dict):
        tree["diffusion"].setdefault(name, value)
