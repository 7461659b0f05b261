"""Settings of ``train_controlnet.py``, and the trainee built from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from torch import nn

from ..checkpoints.checkpoint import Identity
from ..checkpoints.controlnets import BaseRecord
from ..checkpoints.loading import SavedNetwork, open_network
from ..config import entries, faults_of, option, section, settings, shown, to_dict
from ..data.loader import Loader
from ..data.spec import ControlSpec, SampleSpec
from ..diffusion.augmentation import AugmentationConfig
from ..diffusion.diffusion_config import DiffusionConfig, create_gaussian_diffusion
from ..distributed.world import World
from ..embeddings.contract import weights_digest
from ..errors import Fault, InputError
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
from .command_line import parse_kind
from .train_generator import GeneratorRun
from .training import TrainingRun, check_same
from .training_commands import TRAINING_COMMANDS

KINDS = ("controlnet", "stage_c_controlnet")
T = TypeVar("T")


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
        check_same(found, known.identity, setting, self.saved.path)
        return BaseRecord(found, image_size)


def of_base(
    section: str, own: T, base: T, path: str, usual: T | None = None, strict: Sequence[str] = (), origin: str = ""
) -> T:
    """The base's settings of a section, which are read from its checkpoint.

    own:    the run's, which may repeat those of the base. usual: those of a run that says nothing, None = the defaults.
    strict: names of settings that must be the base's even where they are the usual ones, which ``origin`` says.

    Raises InputError for one that is neither the usual one nor the base's.
    """
    kind, usual = type(own), usual or type(own)()
    rows = zip(*(entries(kind, to_dict(each), f"{section}.") for each in (own, base, usual)), strict=True)
    for (name, free, value), (_, _, found), (_, _, default) in rows:
        is_strict = name.removeprefix(f"{section}.") in strict
        if free or value == found or (value == default and not is_strict):
            continue
        source = f" ({origin})" if is_strict else ""
        rule = f"but the base {path} has {shown(found)}: leave it out, or give another base"
        raise InputError(f"{name} is {shown(value)}{source}, {rule}")
    return base


class SteeredRun(TrainingRun):
    """Base of the config of a ControlNet's training, before that of what is steered.

    steered: of the instance that ``settled`` returns.
    """

    steered: ClassVar[Steered | None] = None
    control: ControlConfig

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from faults_of(self.control.check, "control")

    @property
    def _steered(self) -> Steered:
        assert self.steered is not None  # ``settled`` comes first
        return self.steered

    def build_tokenizer(self) -> Tokenizer | None:
        """The base's."""
        return self.steered.saved.tokenizer if self.steered else super().build_tokenizer()

    def identity(self, tokenizer: Tokenizer | None) -> Identity:
        """Without a tokenizer: the base reads the text."""
        return super().identity(None)

    def sample_spec(self, tokenizer: Tokenizer | None) -> SampleSpec:
        """With the ready-made controls that the filter reads."""
        spec, control_filter = super().sample_spec(tokenizer), self._steered.control_filter
        if not isinstance(control_filter, ReadyFilter):
            return spec
        return replace(spec, control=ControlSpec(control_filter.member, control_filter.channels))


@settings
class ControlNetRun(SteeredRun, GeneratorRun):
    """Settings of ``train_controlnet.py``: of a ControlNet for a base generator.

    ``model``, ``tokenizer`` and ``diffusion`` are the base's, which ``settled`` reads.
    """

    kind: ClassVar[str] = "controlnet"

    model_path: str = option("", "checkpoint of the base generator: ema_….pt or model….pt", required=True, free=True)
    control: ControlConfig = section(ControlConfig)
    controlnet: UnetControlConfig = section(UnetControlConfig)
    model: GeneratorConfig = section(GeneratorConfig, flags=False)
    tokenizer: TokenizerConfig = section(TokenizerConfig, flags=False)
    diffusion: DiffusionConfig = section(DiffusionConfig, flags=False)
    augmentation: AugmentationConfig = section(AugmentationConfig, flags=False)
    base: BaseRecord = section(BaseRecord, flags=False)

    def settled(self, world: World) -> ControlNetRun:
        path = self.model_path
        if not path:
            rule = "is required: the checkpoint of the base generator, ema_….pt or model….pt"
            raise InputError(Fault("model_path", rule))
        saved = open_network(path, "generator")
        settings = saved.settings
        steered = Steered(saved, saved.load(world.device), self.control.create())
        steered.tell(world)
        run = replace(
            self,
            model=of_base("model", self.model, settings.model, path),
            tokenizer=of_base("tokenizer", self.tokenizer, settings.tokenizer, path),
            diffusion=of_base("diffusion", self.diffusion, settings.diffusion, path),
            control=replace(self.control, control_channels=steered.control_filter.channels),
            base=steered.record(self.base, settings.model.unet.image_size, "model_path"),
        )
        return run.holding(steered=steered)

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
