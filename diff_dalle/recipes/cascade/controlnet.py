"""Training a ControlNet of stage C from the documented file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import ClassVar, cast

from ...checkpoints.controlnets import BaseRecord, StageCControlNetSettings
from ...checkpoints.decoder import ClipConfig
from ...checkpoints.loading import open_network
from ...config import Fault, InputError, faults_of, named, option, section, settings
from ...diffusion.log_snr import LogSnrProcess
from ...distributed.world import World
from ...images.control_filters.contract import Materials
from ...images.control_filters.table import ControlConfig
from ...models.adapters.latent_controlnet import BACKBONES, LatentControlConfig, LatentControlNet
from ...models.latent.semantic import SemanticAutoencoder
from ...models.latent.stages import STAGE_C_SIZES, StageC, StageCConfig
from ...tasks.control import BASE, ControlledStageCTask
from ...tasks.latent import LatentTask
from ...text.tokenizer import Tokenizer
from ..control import Steered, of_base, steered_session
from ..recipe import Recipe, Session
from .sections import CONTROLNET_KEYS, HOMES, REFUSED, RENAMED
from .session import HUB_NAMES, latent_session, latent_task
from .stages import StageCRun, size_of_base, with_frozen

# Settings of the process that concern training alone: the ControlNet's are its own.
TRAINED_BY = (
    "loss_weighting", "p2_k", "p2_gamma", "p2_s", "min_snr_gamma", "sigmoid_s", "loss_shift", "loss_weight_limits",
    "offset_noise", "pyramid_noise",
)  # fmt: skip
SECTIONS: dict[str, type] = {"control": ControlConfig, "controlnet": LatentControlConfig}  # of the documented keys
STRUCTURE = ("widths", "down_blocks", "up_blocks")  # what model_version says


@settings
class StageCControlNetRun(StageCRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_c_controlnet``.

    ``model``, ``tokenizer`` and ``diffusion`` are the base's, which are read when the run is opened, except for what
    concerns training alone.
    """

    kind: ClassVar[str] = "stage_c_controlnet"
    refused: ClassVar[dict[str, str]] = {
        key: reason for key, reason in REFUSED.items() if key not in CONTROLNET_KEYS or key == "offset_noise"
    }
    homes: ClassVar[Mapping[str, tuple[str, str]]] = {
        **HOMES,
        **{each.name: (name, each.name) for name, kind in SECTIONS.items() for each in fields(kind)},
        "offset_noise": ("diffusion", "offset_noise"),
    }
    renamed: ClassVar[Mapping[str, str]] = {**RENAMED, "init_checkpoint": "controlnet_checkpoint_path"}

    model_version: str | None = size_of_base(STAGE_C_SIZES)  # type: ignore[assignment]
    generator_checkpoint_path: str | None = option(None, "checkpoint of the base, a stage C", required=True, free=True)
    controlnet_checkpoint_path: str | None = option(
        None, "model or EMA file of a ControlNet to initialize the weights from; none = from scratch", free=True
    )
    control: ControlConfig = section(ControlConfig)
    controlnet: LatentControlConfig = section(LatentControlConfig)
    base: BaseRecord = section(BaseRecord, flags=False)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from faults_of(self.control.check, "control")

    @property
    def needed(self) -> list[str]:
        return [*super().needed, "control"]

    @property
    def initial_weights(self) -> str | None:
        return self.controlnet_checkpoint_path

    def session(self, recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
        path = cast(str, self.generator_checkpoint_path)
        saved = open_network(path, "stage_c")
        base, version = saved.settings, self.model_version
        usual = STAGE_C_SIZES[version] if version else StageCConfig()
        strict = STRUCTURE if version else ()
        trained_by = {name: getattr(self.diffusion, name) for name in TRAINED_BY}
        base = replace(base, diffusion=replace(base.diffusion, **trained_by))
        run, frozen = with_frozen(
            replace(
                self,
                model=of_base("model", self, base, path, usual, strict, f"model_version {version}"),
                tokenizer=of_base("tokenizer", self, base, path),
                diffusion=of_base("diffusion", self, base, path),
                trained_with=base.trained_with,
                clip_text_model_name=self.clip_text_model_name or _name_of(base.trained_with.text_clip),
                clip_image_model_name=self.clip_image_model_name or _name_of(base.trained_with.image_clip),
            ).resolved(),
            world,
        )
        semantic = frozen.semantic
        materials = Materials(semantic.encode, semantic.config.semantic_channels, semantic.config.stride)
        control, controlnet = self._as_started(self.control, _with_encoder(self.controlnet, semantic))
        if control != self.control:
            changed, trained = control.controlnet_filter_params, self.controlnet_checkpoint_path
            world.print(f"Note: controlnet_filter_params is {changed}, as {trained} was trained.")
        steered = Steered.open(saved, control, world, materials)
        controlnet.check_blocks(run.model)
        run = replace(
            run,
            control=replace(control, control_channels=steered.control_filter.channels),
            controlnet=controlnet,
            base=steered.record(self.base, run.image_size, "generator_checkpoint_path"),
        )
        recipe = replace(recipe.of(run), network=StageCControlNetSettings.of_run(run))
        session = steered_session(latent_session(recipe, world, frozen, saved.tokenizer), steered)

        def plain(model: StageC) -> LatentTask:
            task = ControlledStageCTask(model, LogSnrProcess(run.diffusion), run.denoising)
            task.add_companion(BASE, session.ready_frozen(steered.network))
            task.control_filter = steered.control_filter
            return task

        def start(network: LatentControlNet) -> None:
            """The backbone as the semantic encoder."""
            network.backbone.start_from(semantic)

        return replace(session, task=partial(latent_task, recipe, world, frozen, plain), start=start)

    def _as_started(
        self, control: ControlConfig, config: LatentControlConfig
    ) -> tuple[ControlConfig, LatentControlConfig]:
        """The settings with what the weights of ``controlnet_checkpoint_path`` do not show of theirs."""
        if not self.controlnet_checkpoint_path:
            return control, config
        start: StageCControlNetSettings = open_network(self.controlnet_checkpoint_path, self.kind).settings
        backbone = replace(config.backbone, stem_padding=start.controlnet.backbone.stem_padding)
        return control.continuing(start.control), replace(config, backbone=backbone)


def _name_of(clip: ClipConfig | None) -> str | None:
    """The name by which a file would give a CLIP."""
    if clip is None:
        return None
    names = {value: name for name, value in HUB_NAMES.items()}
    return names.get((clip.make, clip.model), clip.model)


def _with_encoder(config: LatentControlConfig, semantic: SemanticAutoencoder) -> LatentControlConfig:
    """The settings with those of the semantic encoder that the backbone starts from. InputError for another make."""
    mode = config.controlnet_bottleneck_mode
    required, found = BACKBONES[mode].encoder, semantic.config.backbone
    if required and required != found:
        other = next(name for name, each in BACKBONES.items() if each.encoder == found)
        start = f"is {mode}, which starts from the weights of a semantic encoder {required}"
        rule = f"but that of {named('effnet_checkpoint_path')} is {found}: set it to {other}, simple or large"
        raise InputError(Fault("controlnet_bottleneck_mode", f"{start}, {rule}"))
    backbone = replace(config.backbone, semantic=semantic.config if mode == "semantic" else None)
    return replace(config, backbone=backbone)
