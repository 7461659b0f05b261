"""Training a ControlNet: a copy of a base's encoder that steers the base, which itself stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import nn

from ..checkpoints.controlnets import BaseRecord, ControlNetSettings
from ..checkpoints.loading import SavedNetwork, open_network
from ..config import Fault, InputError, entries, faults_of, option, section, settings, shown, to_dict
from ..data.loader import Loader
from ..data.spec import ControlSpec
from ..diffusion.augmentation import AugmentationConfig
from ..diffusion.diffusion_config import DiffusionConfig, training_process
from ..distributed.world import World
from ..embeddings.contract import weights_digest
from ..images.control_filters.contract import ControlFilter, Materials, ReadyFilter
from ..images.control_filters.table import ControlConfig
from ..images.signal import to_uint8
from ..models.adapters.controlnet import ControlNet, UnetControlConfig
from ..models.generator import GeneratorConfig
from ..tasks.alignment import AlignmentConfig
from ..tasks.control import BASE, ControlledDenoisingTask, control_of, pictures_of
from ..tasks.perceptual import PerceptualConfig
from ..tasks.previews import Previews
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..training.settings import chosen_task
from .generator import GeneratorRun, open_generator, previews_of
from .recipe import Recipe, Session, check_same


class Steered(NamedTuple):
    """What a ControlNet is trained with: the base's file and network, frozen, and the filter."""

    saved: SavedNetwork
    network: nn.Module
    control_filter: ControlFilter

    @classmethod
    def open(
        cls, saved: SavedNetwork, control: ControlConfig, world: World, materials: Materials | None = None
    ) -> Steered:
        """materials: what some filters need."""
        if control.note:
            world.print(f"Note: {control.note}.")
        return cls(saved, saved.load(world.device), control.create(materials))

    def record(self, known: BaseRecord, image_size: int, setting: str) -> BaseRecord:
        """What to say about the base. InputError when the run has another."""
        found = weights_digest(self.network.state_dict())
        check_same(found, known.identity, setting, self.saved.path)
        return BaseRecord(found, image_size)


def of_base(
    section: str, run: Any, base: Any, path: str, usual: Any = None, strict: Sequence[str] = (), origin: str = ""
) -> Any:
    """The settings of ``base`` in a section, which are read from its checkpoint.

    run:    may repeat those of the base. usual: those of a run that says nothing, None = the defaults.
    strict: names of settings that must be the base's even where they are the usual ones, which ``origin`` says.

    Raises InputError for one that is neither the usual one nor the base's.
    """
    own, found = getattr(run, section), getattr(base, section)
    kind, usual = type(own), usual or type(own)()
    rows = zip(*(entries(kind, to_dict(each), f"{section}.") for each in (own, found, usual)), strict=True)
    for (name, free, value), (_, _, theirs), (_, _, default) in rows:
        is_strict = name.removeprefix(f"{section}.") in strict
        if free or value == theirs or (value == default and not is_strict):
            continue
        source = f" ({origin})" if is_strict else ""
        rule = f"but the base {path} has {shown(theirs)}: leave it out, or give another base"
        raise InputError(f"{name} is {shown(value)}{source}, {rule}")
    return found


def steered_session(session: Session, steered: Steered) -> Session:
    """The session of a ControlNet, from that of its base's kind with the ControlNet's task.

    Its checkpoints have no tokenizer: the base reads the text. Samples have the ready-made controls that the filter
    reads.
    """
    spec, control_filter = session.spec, steered.control_filter
    if isinstance(control_filter, ReadyFilter):
        spec = replace(spec, control=ControlSpec(control_filter.member, control_filter.channels))
    return replace(session, spec=spec, is_text_recorded=False)


@settings
class ControlNetRun(GeneratorRun):
    """Settings of ``train_controlnet.py``: of a ControlNet for a base generator.

    ``model``, ``tokenizer`` and ``diffusion`` are the base's, which are read when the run is opened.
    """

    kind: ClassVar[str] = "controlnet"
    has_auxiliaries: ClassVar[bool] = False

    model_path: str = option("", "checkpoint of the base generator: ema_….pt or model….pt", required=True, free=True)
    control: ControlConfig = section(ControlConfig)
    controlnet: UnetControlConfig = section(UnetControlConfig)
    model: GeneratorConfig = section(GeneratorConfig, flags=False)
    tokenizer: TokenizerConfig = section(TokenizerConfig, flags=False)
    diffusion: DiffusionConfig = section(DiffusionConfig, flags=False)
    augmentation: AugmentationConfig = section(AugmentationConfig, flags=False)
    alignment: AlignmentConfig = section(AlignmentConfig, flags=False)
    perceptual: PerceptualConfig = section(PerceptualConfig, flags=False)
    base: BaseRecord = section(BaseRecord, flags=False)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        yield from faults_of(self.control.check, "control")

    def recipe(self, processes: int = 1) -> Recipe:
        recipe = super().recipe(processes)
        return replace(recipe, network=ControlNetSettings.of_run(self), opening=open_controlnet)


def open_controlnet(recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
    run: ControlNetRun = recipe.settings
    path = run.model_path
    if not path:
        rule = "is required: the checkpoint of the base generator, ema_….pt or model….pt"
        raise InputError(Fault("model_path", rule))
    saved = open_network(path, "generator")
    base = saved.settings
    steered = Steered.open(saved, run.control, world)
    sections = {name: of_base(name, run, base, path) for name in ("model", "tokenizer", "diffusion")}
    run = replace(
        run,
        **sections,
        control=replace(run.control, control_channels=steered.control_filter.channels),
        base=steered.record(run.base, base.model.unet.image_size, "model_path"),
    )
    recipe = replace(recipe.of(run), network=ControlNetSettings.of_run(run))
    session = steered_session(open_generator(recipe, world, saved.tokenizer), steered)

    def task(model: nn.Module, name: str, shown: Loader) -> ControlledDenoisingTask:
        controlled = chosen_task(run.training.task, ControlledDenoisingTask)
        found = controlled(model, training_process(run.diffusion), run.denoising, run.num_classes)
        found.preview = _previews(recipe, world, steered, saved.tokenizer, shown)
        found.add_companion(BASE, session.ready_frozen(steered.network))
        found.control_filter = steered.control_filter
        return found

    def start(network: ControlNet) -> None:
        """As the base's encoder."""
        network.start_from(steered.network)

    return replace(session, task=task, start=start)


def _previews(
    recipe: Recipe, world: World, steered: Steered, tokenizer: Tokenizer | None, data: Loader
) -> Previews | None:
    """As of a generator, beside the controls."""
    previews = previews_of(recipe, world, tokenizer, data)
    if previews is None:
        return None
    control_filter, batch = steered.control_filter, data.first(len(previews.captions))
    control = control_of(control_filter, batch)
    shown = to_uint8(2 * control_filter.shown(control, pictures_of(batch)) - 1).cpu().numpy()
    originals = previews.signal.to_pixels(batch.images.cpu())
    cond = replace(previews.cond, control=control.cpu())
    return replace(previews, cond=cond, inputs=shown, originals=originals)
