"""Training stages B and C of a latent cascade, which denoise latents of frozen networks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from typing_extensions import Self

from ...checkpoints.cascade import LatentSampling, StageBDiffusion, StageBSampling, TrainedWith
from ...checkpoints.decoder import CLIP_OUTPUTS
from ...config import Fault, InputError, named, option, section, settings
from ...data.arrays import Grid
from ...diffusion.log_snr import LogSnrProcess
from ...diffusion.log_snr_config import LogSnrConfig
from ...distributed.world import World
from ...images.signal import LatentSignal
from ...models.latent.config import LatentUnetConfig
from ...models.latent.semantic import SemanticAutoencoder
from ...models.latent.stage_a import StageA
from ...models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageB, StageBConfig, StageC, StageCConfig
from ...tasks.latent import (
    SEMANTIC,
    STAGE_A,
    LatentTask,
    StageBTask,
    StageBTaskConfig,
    StageCTask,
    StageCTaskConfig,
)
from ...tasks.semantic import JointStageBTask
from ...text.tokenizer import Tokenizer, TokenizerConfig
from ..recipe import Recipe, Session, check_same
from .file import CascadeRun, data_of
from .session import (
    IMAGE_NAME,
    TEXT_NAME,
    Frozen,
    check_channels,
    check_image_clip,
    check_text_clip,
    identity_of,
    latent_session,
    load_semantic,
    load_stage_a,
    open_clip,
    outputs_of_clips,
)
from .stored import Condition, Maker, Pictures, changing_pictures, is_text, text_conditions


@settings
class LatentRun(CascadeRun):
    """Settings of stages B and C; a kind adds ``model``, ``diffusion``, ``denoising`` and ``sampling``."""

    if TYPE_CHECKING:
        model: LatentUnetConfig = section(LatentUnetConfig)
        diffusion: LogSnrConfig = section(LogSnrConfig)

    image_clip_name: ClassVar[str | None] = None  # the CLIP of the images; None = none is used
    trains_encoder: ClassVar[bool] = False  # the semantic encoder is trained along

    adaptive_loss_weight: bool | None = option(
        None, "weight the loss by 1 / its running value per log-SNR; False = p2; none = diffusion.loss_weighting"
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
    latents_path: str | None = option(
        None,
        "output folder of prepare_data.py latents: latents, text and image embeddings of the training samples, read "
        "in place of pixels and captions; none = compute them in every step",
        free=True,
    )
    clip_outputs: str | None = option(
        None,
        "CLIP outputs to use: unit = embeddings of norm 1, states after the last norm, zeros at padding; released = "
        "as in the released networks; none = as generator_checkpoint_path was trained, else unit",
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
        yield from super().faults()
        adaptive, weighting = self.adaptive_loss_weight, self.diffusion.loss_weighting
        if adaptive is not None and weighting != (("adaptive",) if adaptive else ("p2",)):
            rule = f"{named('diffusion.loss_weighting')} is {', '.join(weighting)}: leave one of them out"
            yield Fault.of(self, "adaptive_loss_weight", rule)
        if self.clip_text_model_name and not self.encodes_outside:
            what = "encodes text itself" if self.has_text else "reads no text"
            yield Fault("clip_text_model_name", f"is given, but the network {what}: leave it out")
        if self.latents_path:
            yield from changing_pictures(data_of(self))

    def resolved(self: Self) -> Self:
        """With the size of the images in what checkpoints say about training, as dry runs print it."""
        known = replace(self.trained_with, image_size=self.image_size)
        return self if known == self.trained_with else replace(self, trained_with=known)

    def recipe(self, processes: int = 1) -> Recipe:
        return replace(super(LatentRun, self.resolved()).recipe(processes), has_text=self.has_text)

    @property
    def has_text(self) -> bool:
        """Whether the network encodes captions itself."""
        return self.model.text.enc_attn_dim > 0

    @property
    def encodes_outside(self) -> bool:
        """Whether a CLIP encodes the captions."""
        return not self.has_text and bool(self.model.states_width or self.model.vector_width)

    @property
    def size_multiple(self) -> int:
        return 0  # the strides are not known yet

    @abstractmethod
    def open_frozen(self, device: torch.device) -> Frozen:
        """The frozen networks, without CLIPs. InputError for those that are not there or do not fit."""

    @property
    def trains_text(self) -> bool:
        """Whether what encodes the captions changes in training."""
        return False

    @property
    def needed(self) -> list[str]:
        """What a step needs of frozen networks, by the names of ``storable`` and others."""
        widths = {"text": self.model.vector_width, "text_states": self.model.states_width}
        return [name for name, width in widths.items() if width and self.encodes_outside]

    def storable(self, frozen: Frozen) -> Iterator[Condition]:
        """What these make of a sample that is the same in every epoch."""
        if frozen.text_clip is not None and not self.trains_text:
            yield from text_conditions(frozen.text_clip, filter(is_text, self.needed), data_of(self).caption_field)

    @property
    def semantic_maker(self) -> Maker:
        return Maker(SEMANTIC, f"semantic encoder {self.effnet_checkpoint_path}", self.trained_with.semantic)

    @property
    def pictures(self) -> Pictures:
        return Pictures.of(data_of(self), self.image_size, self.loop.seed)

    @abstractmethod
    def signal(self, frozen: Frozen) -> LatentSignal:
        """What is denoised."""

    @abstractmethod
    def task(self, frozen: Frozen, network: Any) -> LatentTask:
        """The task, without previews."""

    def session(self, recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
        run, frozen = with_frozen(self, world)
        return latent_session(recipe.of(run), world, frozen, tokenizer)


def with_frozen(run: LatentRun, world: World) -> tuple[Any, Frozen]:
    """The run of stage B or C with what identifies its frozen networks, and these. InputError for others than those
    that it was begun with."""
    frozen, known = run.open_frozen(world.device), run.trained_with
    networks: dict[str, tuple[SemanticAutoencoder | StageA, str]] = {
        "semantic": (frozen.semantic, "effnet_checkpoint_path")
    }
    if frozen.stage_a is not None:
        networks["stage_a"] = frozen.stage_a, "stage_a_checkpoint_path"
    for name, (network, setting) in networks.items():
        identity = ""
        if name != "semantic" or not run.trains_encoder:  # else nobody knows yet what it will be
            identity = identity_of(network)
            check_same(identity, getattr(known, name), setting, getattr(run, setting))
        known = replace(known, **cast(Any, {name: identity, f"{name}_stride": network.config.stride}))
    if run.trains_encoder:
        known = replace(known, encoder=frozen.semantic.config)
    outputs = run.clip_outputs or outputs_of_clips(run.generator_checkpoint_path)
    if run.encodes_outside:
        name = run.clip_text_model_name or TEXT_NAME
        clip, recorded = open_clip(name, outputs, known.text_clip, "clip_text_model_name", world.device)
        check_text_clip(clip, run.model)
        frozen, known = replace(frozen, text_clip=clip), replace(known, text_clip=recorded)
    if run.image_clip_name:
        name, setting = run.image_clip_name, "clip_image_model_name"
        clip, recorded = open_clip(name, outputs, known.image_clip, setting, world.device)
        check_image_clip(clip, run.model)
        frozen, known = replace(frozen, image_clip=clip), replace(known, image_clip=recorded)
    run = replace(run, trained_with=known)
    scale = run.signal(frozen).scale
    InputError.check(run.wrong_sizes(math.lcm(known.semantic_stride, scale * run.model.patch_size)))
    return run, frozen


@settings
class StageBRun(LatentRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_b``."""

    kind: ClassVar[str] = "stage_b"
    sizes: ClassVar[Mapping[str, Any]] = STAGE_B_SIZES

    model_version: str = option("3B", "network size, which model may override", choices=STAGE_B_SIZES, required=True)
    stage_a_checkpoint_path: str = option("", "checkpoint of stage A (kind: stage_a)", required=True, free=True)
    train_encoder: bool = option(
        False,
        "also train the semantic encoder, from effnet_checkpoint_path; import_cascade.py then makes a checkpoint of "
        "it, for stage C and for sampling",
    )
    shift: float | None = option(
        None,
        "unused: published files have it, but the training of published stages B never read it; diffusion.shift "
        "shifts training and sampling",
        free=True,
    )
    model: StageBConfig = section(StageBConfig, flags=False)
    diffusion: StageBDiffusion = section(StageBDiffusion, flags=False)
    denoising: StageBTaskConfig = section(StageBTaskConfig, flags=False)
    sampling: StageBSampling = section(StageBSampling, flags=False)

    def notes(self) -> Iterator[str]:
        yield from super().notes()
        if self.shift is not None and self.shift != self.diffusion.shift:
            yield (
                f"shift is {self.shift:g}, but not used: the published stages B were trained without it; "
                f"diffusion.shift, now {self.diffusion.shift:g}, shifts training and sampling"
            )

    def open_frozen(self, device: torch.device) -> Frozen:
        semantic = load_semantic(self.effnet_checkpoint_path, device)
        stage_a = load_stage_a(self.stage_a_checkpoint_path, device)
        model, channels = self.model, semantic.config.semantic_channels
        check_channels("model.channels", model.channels, stage_a.config.latent_channels, "stage A")
        check_channels("model.semantic_channels", model.semantic_channels, channels, "the semantic encoder")
        return Frozen(semantic, stage_a)

    def signal(self, frozen: Frozen) -> LatentSignal:
        stage_a = cast(StageA, frozen.stage_a)
        return LatentSignal(self.model.channels, stage_a.config.stride, "stage A", stage_a.encode, stage_a.decode)

    @property
    def trains_encoder(self) -> bool:  # type: ignore[override]
        return self.train_encoder

    @property
    def needed(self) -> list[str]:
        return [STAGE_A, SEMANTIC, *super().needed]

    def storable(self, frozen: Frozen) -> Iterator[Condition]:
        known, pictures, semantic, stage_a = self.trained_with, self.pictures, frozen.semantic, frozen.stage_a
        assert stage_a is not None
        maker = Maker(STAGE_A, f"stage A {self.stage_a_checkpoint_path}", known.stage_a)
        yield Condition.of_images(pictures, maker, stage_a.encode, Grid(self.model.channels, known.stage_a_stride))
        low, high = self.denoising.semantic_scale
        if low == high and not self.trains_encoder:
            grid = Grid(self.model.semantic_channels, known.semantic_stride, low)
            yield Condition.of_images(pictures, self.semantic_maker, semantic.encode, grid)
        yield from super().storable(frozen)

    def task(self, frozen: Frozen, network: StageB) -> LatentTask:
        given = network, LogSnrProcess(self.diffusion), self.denoising
        return JointStageBTask(*given, frozen.semantic) if self.train_encoder else StageBTask(*given)


@settings
class StageCRun(LatentRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_c``."""

    kind: ClassVar[str] = "stage_c"
    sizes: ClassVar[Mapping[str, Any]] = STAGE_C_SIZES

    model_version: str = option("3.6B", "network size, which model may override", choices=STAGE_C_SIZES, required=True)
    previewer_checkpoint_path: str | None = option(
        None, "checkpoint of the previewer (kind: semantic); none = effnet_checkpoint_path", free=True
    )
    clip_image_model_name: str | None = option(
        None,
        f"CLIP for image embeddings, as clip_text_model_name; none = {IMAGE_NAME}, unless model.image_width is 0",
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
    def image_clip_name(self) -> str | None:  # type: ignore[override]
        return (self.clip_image_model_name or IMAGE_NAME) if self.model.image_width else None

    @property
    def needed(self) -> list[str]:
        return [SEMANTIC, *(["image"] if self.image_clip_name else []), *super().needed]

    def storable(self, frozen: Frozen) -> Iterator[Condition]:
        clip, grid = frozen.image_clip, Grid(self.model.channels, self.trained_with.semantic_stride)
        yield Condition.of_images(self.pictures, self.semantic_maker, frozen.semantic.encode, grid)
        if clip is not None:
            maker = Maker("image", clip.name, clip.identity)
            yield Condition.of_images(self.pictures, maker, clip.encode_images, clip.embed_dim)
        yield from super().storable(frozen)

    def open_frozen(self, device: torch.device) -> Frozen:
        semantic = load_semantic(self.effnet_checkpoint_path, device)
        path = self.previewer_checkpoint_path
        previewer = load_semantic(path, device) if path else semantic
        channels = semantic.config.semantic_channels
        check_channels("model.channels", self.model.channels, channels, "the semantic encoder")
        if previewer.config.semantic_channels != channels:
            found = f"is {path}, which decodes latents of {previewer.config.semantic_channels} channels"
            rule = f"{found}, but those of the semantic encoder have {channels}: give its own previewer"
            raise InputError(Fault("previewer_checkpoint_path", rule))
        return Frozen(semantic, previewer=previewer)

    def signal(self, frozen: Frozen) -> LatentSignal:
        semantic, previewer = frozen.semantic, cast(SemanticAutoencoder, frozen.previewer)
        return LatentSignal(
            self.model.channels, semantic.config.stride, "a previewer", semantic.encode, previewer.preview
        )

    def task(self, frozen: Frozen, network: StageC) -> LatentTask:
        return StageCTask(network, LogSnrProcess(self.diffusion), self.denoising)


def size_of_base(sizes: Mapping[str, Any]) -> Any:
    """The setting ``model_version`` of what is trained over a base."""
    return option(None, "size of the base; none = whatever it has", choices=tuple(sizes))


def _complete(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set ``diffusion.NAME`` unless the file does."""
    if isinstance(tree.setdefault("diffusion", {}), dict):
        tree["diffusion"].setdefault(name, value)
