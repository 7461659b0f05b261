"""Settings of ``train_controlnet.py``, and the trainee built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

from torch import nn

from ..checkpoints.checkpoint import Identity
from ..checkpoints.controlnets import BaseRecord
from ..checkpoints.loading import SavedNetwork, open_network
from ..config import option, redacted, section, to_dict
from ..data.loader import Loader
from ..data.spec import ControlSpec, SampleSpec
from ..diffusion.augmentation import AugmentationConfig
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..distributed.world import World
from ..embeddings.contract import weights_digest
from ..errors import InputError
from ..images.control_filters.contract import ControlFilter
from ..images.control_filters.ready import ReadyFilter
from ..images.control_filters.table import ControlConfig
from ..images.pixels import to_uint8
from ..models.adapters.controlnet import ControlNet
from ..models.adapters.unet_controlnet import UnetControlConfig
from ..models.generator import GeneratorConfig
from ..tasks.control import BASE, ControlledDenoisingTask, control_of, pictures_of
from ..tasks.previews import Previews
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..training.trainee import Trainee
from .base_settings import of_base
from .command_line import parse_kind
from .train_generator import GeneratorRun
from .training_commands import TRAINING_COMMANDS

KINDS = ("controlnet", "stage_c_controlnet")


class Steered(NamedTuple):
    """What a ControlNet is trained with: the base's file and network, frozen, and the filter."""

    saved: SavedNetwork
    network: nn.Module
    control_filter: ControlFilter

    def tell(self, world: World) -> None:
        """Print what the filter has to say."""
        if self.control_filter.note:
            world.print(f"Note: {self.control_filter.note}.")

    def record(self, known: BaseRecord, image_size: int, setting: str) -> BaseRecord:
        """What to say about the base. InputError when the run has another."""
        found = weights_digest(self.network.state_dict())
        if known.identity and known.identity != found:
            raise InputError(
                f"{setting} is {self.saved.path}, whose weights are {found}, but the run was begun with "
                f"{known.identity}: give those"
            )
        return BaseRecord(found, image_size)


def with_control(spec: SampleSpec, control_filter: ControlFilter) -> SampleSpec:
    """``spec`` with the ready-made controls that a filter reads."""
    if not isinstance(control_filter, ReadyFilter):
        return spec
    return replace(spec, control=ControlSpec(control_filter.member, control_filter.channels))


@dataclass(frozen=True)
class ControlNetRun(GeneratorRun):
    """Settings of ``train_controlnet.py``: of a ControlNet for a base generator.

    ``model``, ``tokenizer`` and ``diffusion`` are the base's, which ``settled`` reads.
    """

    kind: ClassVar[str] = "controlnet"
    steered: ClassVar[Steered | None] = None  # of the instance that ``settled`` returns

    model_path: str = option("", "checkpoint of the base generator: ema_….pt or model….pt", required=True, free=True)
    control: ControlConfig = section(ControlConfig)
    controlnet: UnetControlConfig = section(UnetControlConfig)
    model: GeneratorConfig = section(GeneratorConfig, flags=False)
    tokenizer: TokenizerConfig = section(TokenizerConfig, flags=False)
    diffusion: DiffusionConfig = section(DiffusionConfig, flags=False)
    augmentation: AugmentationConfig = section(AugmentationConfig, flags=False)
    base: BaseRecord = section(BaseRecord, flags=False)

    def __post_init__(self):
        super().__post_init__()
        self.control.check()

    def settled(self, world: World) -> ControlNetRun:
        path = self.model_path
        if not path:
            raise InputError("--model_path is required: the checkpoint of the base generator, ema_….pt or model….pt")
        saved = open_network(path, "generator")
        settings = saved.settings
        steered = Steered(saved, saved.load(world.device), self.control.create())
        steered.tell(world)
        run = replace(
            self,
            model=of_base(self.model, settings.model, GeneratorConfig(), path),
            tokenizer=of_base(self.tokenizer, settings.tokenizer, TokenizerConfig(), path),
            diffusion=of_base(self.diffusion, settings.diffusion, DiffusionConfig(), path),
            control=replace(self.control, control_channels=steered.control_filter.channels),
            base=steered.record(self.base, settings.model.unet.image_size, "model_path"),
        )
        object.__setattr__(run, "steered", steered)
        return run

    @property
    def _steered(self) -> Steered:
        assert self.steered is not None  # ``settled`` comes first
        return self.steered

    def build_tokenizer(self) -> Tokenizer | None:
        """The base's."""
        return self.steered.saved.tokenizer if self.steered else super().build_tokenizer()

    def identity(self, tokenizer: Tokenizer | None) -> Identity:
        """Without a tokenizer: the base reads the text."""
        config = redacted(to_dict(self))
        del config["training"]["logdir"]
        return Identity(self.kind, config)

    def sample_spec(self, tokenizer: Tokenizer | None) -> SampleSpec:
        return with_control(super().sample_spec(tokenizer), self._steered.control_filter)

    def initialize(self, network: nn.Module) -> None:
        """As the base's encoder."""
        if self.steered:
            cast(ControlNet, network).start_from(self.steered.network)

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        process, previews = create_gaussian_diffusion(self.diffusion), self.build_previews(tokenizer, shown)
        model = self.build_model(None, world)
        task = ControlledDenoisingTask(model, process, self.denoising, self.num_classes, previews)
        task.add_companion(BASE, self.shard_frozen(self._steered.network, world))
        task.control_filter = self._steered.control_filter
        return [Trainee(task, self.optim, self.training.precision, world)]

    def build_previews(self, tokenizer: Tokenizer | None, data: Loader) -> Previews | None:
        """As of a generator, beside the controls."""
        previews = super().build_previews(tokenizer, data)
        if previews is None:
            return None
        control_filter, batch = self._steered.control_filter, data.first(self.preview.preview_samples)
        control = control_of(control_filter, batch)
        shown = to_uint8(2 * control_filter.shown(control, pictures_of(batch)) - 1).cpu().numpy()
        originals = self.signal.to_pixels(batch.images.cpu())
        cond = replace(previews.cond, control=control.cpu())
        return replace(previews, cond=cond, inputs=shown, originals=originals)


def parse_controlnet(argv: Sequence[str] | None = None, description: str = "") -> Any:
    """The command line as the run of a kind: of a generator's ControlNet, unless a file or ``--kind`` says another."""
    return parse_kind({kind: TRAINING_COMMANDS[kind].config_class for kind in KINDS}, argv, description)
