"""Training a LoRA: low-rank changes of the weights of a trained network, and new tokens, while the network stays as it
is. ``with_lora`` makes the recipe of a LoRA out of that of its base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from torch import nn

from .. import storage
from ..checkpoints.checkpoint import load_file
from ..checkpoints.kinds import find_kind
from ..checkpoints.loading import SavedNetwork, open_networks
from ..checkpoints.lora_file import ENDING, LoraAbout, base_of, read_lora, write_lora
from ..checkpoints.model_folder import find_file
from ..config import Fault, InputError, Section, differences, faults_of, members, named, option, present_form, settings
from ..config.bounds import MAX_WIDTH
from ..data.loader import Loader
from ..data.mixed import MixedLoader
from ..data.spec import CaptionSpec
from ..diffusion.losses import LOSSES, is_bound
from ..distributed.world import World
from ..embeddings.contract import weights_digest
from ..models.adapters.lora import RECIPES, Adapted
from ..tasks.imitation import Imitation
from ..tasks.latent import LatentTask
from ..text.tokenizer import Tokenizer
from ..text.trained_tokens import Extensible, TokenSpec, find_tokens, parse_token, tokens_option
from ..training.saving import FilesWithWeights
from ..training.task import Task
from ..training.trainee import Trainee
from .cascade.file import check_imported
from .cascade.sections import RENAMED
from .cascade.stages import STAGE_B_SIZES, STAGE_C_SIZES, StageBRun, StageCRun, size_of_base
from .classifier import ClassifierRun
from .decoder import DecoderRun
from .generator import GeneratorRun
from .recipe import Exports, Recipe, Session, overlaid, standard_loaders
from .tokens_in_captions import checked_loaders

# How the names of settings of a diffusion process begin that concern training alone, and may differ from the base's.
TRAINING_ONLY = ("loss_", "p2_", "min_snr_", "sigmoid_", "vb_", "offset_noise", "pyramid_noise")
TASK_SECTIONS = ("denoising",)  # as the base's training had them, unless told otherwise


@settings
class LoraSettings:
    """What every training of a LoRA is set by, beside the settings of its base's kind.

    base_setting: the one that gives the checkpoint of the base.
    no_prior:     why there are no regularization images; "" = there may be.
    """

    kind: ClassVar[str]
    base_setting: ClassVar[str] = "model_path"
    no_prior: ClassVar[str] = ""

    module_filters: tuple[str, ...] = option(
        ("att",),  # attention and attn
        "layers to adapt: linear layers and convolutions whose dotted names contain one of these; none = train "
        "tokens only",
    )
    rank: int = option(4, "rank of the update", least=1, most=MAX_WIDTH)
    alpha: float = option(4.0, "a weight's update is alpha / rank times up times down", above=0)
    lora_recipe: str = option(
        RECIPES[0],
        "initialization: standard = down random, up 0; published = as in Stable Cascade's LoRAs: up from N(0, 1), "
        "down 0, with alpha 1 unless given",
        choices=RECIPES,
    )
    train_tokens: tuple[str, ...] = tokens_option()
    lora_checkpoint_path: str | None = option(
        None, "LoRA file of the same modules, rank and tokens to start from; none = from scratch", free=True
    )
    prior_data_dir: tuple[str, ...] = option(
        (),
        "shards of regularization images, as data_dir, half of every batch, to keep what the base knows; none = no "
        "such images",
        free=True,
    )
    prior_weight: float = option(1.0, "weight of the loss of regularization images", needs=("prior_data_dir",), least=0)
    prior_target: str = option(
        "images",
        "target for regularization images: the images themselves, or the base's prediction of them at the same "
        "noise, as for all images with dropped captions",
        choices=("images", "base"),
        needs=("prior_data_dir",),
    )
    base_weights: tuple[str, ...] = option(
        (),
        "required identity of the base's weights, or NAME=IDENTITY for each of several networks; recorded by "
        "training, none = any",
    )
    accept_changed_base: bool = option(
        False, "start from a LoRA that was trained for another base", free=True, needs=("lora_checkpoint_path",)
    )

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a file with those of the base, as its checkpoint says them. InputError for others."""
        complete = getattr(super(), "completed", None)  # of a cascade's file
        completed = complete(tree) if complete else overlaid(tree, {})
        if completed.get("lora_recipe") == "published":
            completed.setdefault("alpha", 1.0)
        path = completed.get(cls.base_setting)
        if not isinstance(path, str) or not path or not storage.exists(find_file(path)):
            return completed  # ``settled`` refuses it
        kind = cls.kind.removesuffix(ENDING)
        open_networks(path, (kind,))  # an InputError for anything else
        own_class: Any = cls
        said = load_file(path)["config"]
        for name, member in members(find_kind(kind)).items():
            assert isinstance(member, Section)  # of a kind's settings
            own = completed.get(name, {})
            if isinstance(own, Mapping):
                of_base = present_form(member.config, {**said.get(name, {})})
                completed[name] = merged = overlaid(of_base, own)
                training = {key: value for key, value in own.items() if str(key).startswith(TRAINING_ONLY)}
                plain = overlaid(of_base, training)
                if changed := differences(plain, merged, member.config):
                    size = ", and model_version, which stands for some" if tree.get("model_version") else ""
                    others = f"but {named(name)} says others: {', '.join(changed)}; leave these out{size}"
                    raise InputError(Fault(cls.base_setting, f"{path} says its settings itself, {others}"))
        for name in TASK_SECTIONS:
            if name in said and name in members(own_class) and isinstance(completed.get(name, {}), Mapping):
                of_base = present_form(cast(Section, members(own_class)[name]).config, said[name])
                completed[name] = overlaid(of_base, completed.get(name, {}))
        return completed

    def faults(self) -> Iterator[Fault]:
        if not self.module_filters and not self.train_tokens:
            rule = f"and {named('train_tokens')} are both empty, so there is nothing to train: set one"
            yield Fault("module_filters", rule)
        yield from faults_of(lambda: self.specs, "train_tokens")
        if self.prior_data_dir and self.no_prior:
            yield Fault("prior_data_dir", f"is set, but {self.no_prior}: leave it out")
        yield from super().faults()  # type: ignore[misc]  # of the base's kind
        recipe = super().recipe()  # type: ignore[misc]
        if recipe.training.sharding.parallel != "ddp":
            rule = f"is {recipe.training.sharding.parallel}, but the base of a LoRA is on every process as a whole"
            yield Fault("parallel", f"{rule}: leave it out")
        if self.prior_data_dir:
            yield from wrong_halves(recipe.training.batch_size)
            if recipe.data.aspect.multi_aspect_ratio:
                other = named("multi_aspect_ratio")
                yield Fault("prior_data_dir", f"and {other} exclude each other: leave one of them out")

    @property
    def network_kind(self) -> str:
        return self.kind.removesuffix(ENDING)

    @property
    def base_path(self) -> str:
        """The checkpoint of the base; "" = not given."""
        return getattr(self, self.base_setting) or ""

    @property
    def specs(self) -> list[TokenSpec]:
        """``train_tokens``."""
        return [parse_token(entry) for entry in self.train_tokens]

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """The names of the networks that are adapted."""
        return ("",)

    def recipe(self, processes: int = 1) -> Recipe:
        return with_lora(super().recipe(processes))  # type: ignore[misc]  # of the base's kind


def wrong_halves(batch_size: int, processes: int = 1) -> Iterator[Fault]:
    """A batch of whose share on each process half cannot be regularization images."""
    if batch_size % (2 * processes):
        rule = "be even" if processes == 1 else f"be a multiple of {2 * processes}, twice the processes,"
        halves = "half of each batch are regularization images"
        yield Fault("batch_size", f"must {rule} with {named('prior_data_dir')}: {halves}", batch_size)


def with_lora(recipe: Recipe) -> Recipe:
    """The recipe of a LoRA. recipe: that of the base's kind, whose settings are ``LoraSettings`` too."""
    return replace(recipe, opening=partial(_open, recipe.opening))


def _open(opening, recipe: Recipe, world: World, _: Tokenizer | None) -> Session:
    lora: LoraSettings = recipe.settings
    if not lora.base_path:
        raise InputError(Fault(lora.base_setting, "is required: the checkpoint of the network to adapt"))
    saved = {each.trainee: each for each in open_networks(lora.base_path, (lora.network_kind,))}
    own_tokenizer = next(iter(saved.values())).tokenizer
    tokens = find_tokens(own_tokenizer, lora.specs) if own_tokenizer and lora.specs else None
    session: Session = opening(recipe, world, tokens.tokenizer if tokens else own_tokenizer)
    bases = _bases(lora, saved, world)
    weights = tuple((f"{name}=" if name else "") + weights_digest(base.state_dict()) for name, base in bases.items())
    _check_weights(lora, weights)
    settings, outside, clip = replace(session.settings, base_weights=weights), None, session.text_clip
    reads: Extensible | None = tokens.tokenizer if tokens else None
    if lora.specs and tokens is None and clip is not None:
        found = find_tokens(clip.tokenizer, lora.specs)
        outside, reads = clip.take_tokens(found).lent(), found.tokenizer
        spec = replace(session.spec, captions=(CaptionSpec(clip.tokenize, clip.text_length),))
        session = replace(session, spec=spec)
    if lora.specs and tokens is None and outside is None:
        raise InputError(Fault("train_tokens", "is set, but the network reads no text: leave it out"))
    about = {name: _about(settings, name) for name in bases}

    def network(name: str) -> Adapted:
        model = Adapted(bases[name], lora.module_filters, lora.rank, lora.alpha, tokens, outside, lora.lora_recipe)
        if lora.lora_checkpoint_path:
            _start_from(model, lora, about[name])
        return model

    def task(model: nn.Module, name: str, shown: Loader) -> Task:
        found = session.task(model, name, shown)
        if outside is not None and isinstance(found, LatentTask):
            found.trains_conditions = True
        if lora.prior_target == "base":
            half = recipe.training.batch_size // 2 * world.size
            found.imitation = Imitation(found.model, half)  # type: ignore[assignment,arg-type]
        return found

    def exports(trainee: Trainee, files: FilesWithWeights) -> Exports:
        """The LoRA file, of the weights as they are evaluated."""
        state = files[trainee.evaluated_role]["state"]
        tensors = {name.removeprefix("lora."): value for name, value in state.items()}
        return {"lora.safetensors": lambda file: write_lora(file, about[trainee.name], tensors)}

    loaders = session.loaders or standard_loaders
    if reads is not None:
        loaders = partial(checked_loaders, loaders, reads)
    if lora.prior_data_dir:
        loaders = partial(_mixed_loaders, loaders)
    return replace(
        session,
        recipe=session.recipe.of(settings),
        task=task,
        initial=network,
        names=tuple(bases),
        loaders=loaders,
        exports=exports,
    )


def _bases(lora: LoraSettings, saved: Mapping[str, SavedNetwork], world: World) -> dict[str, nn.Module]:
    """The networks that are adapted, by name, with their weights."""
    for name in lora.adapted_names:
        if name not in saved:
            raise InputError(f"{lora.base_path} does not hold {name}, which is to be trained: give a file with it")
    return {name: saved[name].load(world.device) for name in lora.adapted_names}


def _check_weights(lora: LoraSettings, weights: tuple[str, ...]) -> None:
    """InputError for a base with other weights than ``base_weights`` says."""
    if lora.base_weights and lora.base_weights != weights:
        said = f"but {named('base_weights')} says {', '.join(lora.base_weights)}: give the checkpoint with these"
        rule = f"{lora.base_path} has the weights {', '.join(weights)}, {said}"
        raise InputError(Fault(lora.base_setting, rule))


def _about(lora: Any, name: str) -> LoraAbout:
    """What the LoRA of a network says about itself."""
    clip = lora.trained_with.text_clip if hasattr(lora, "trained_with") else None
    token_clip = clip.identity if clip and lora.train_tokens else ""  # "" = the tokens belong to the network
    base = base_of(lora.base_weights, name)
    own = lora.module_filters, lora.train_tokens, token_clip
    return LoraAbout(lora.network_kind, name, base, lora.rank, lora.alpha, *own)


def _start_from(model: Adapted, lora: LoraSettings, own: LoraAbout) -> None:
    path = lora.lora_checkpoint_path or ""
    start = read_lora(path)
    expected = replace(own, base=start.about.base) if lora.accept_changed_base else own
    if start.about != expected:
        differing = [name for name, value in vars(expected).items() if getattr(start.about, name) != value]
        accept = f", or accept the other base by {named('accept_changed_base')} True"
        hint = accept if differing == ["base"] else ""
        rule = f"{path} has another {' and '.join(differing)} than this run: give one trained with the same{hint}"
        raise InputError(Fault("lora_checkpoint_path", rule))
    model.load_state_dict({f"lora.{name}": value for name, value in start.tensors.items()})


def _mixed_loaders(loaders, session: Session) -> tuple[Any, Loader | None]:
    """Training data of which every second half of a batch are regularization images."""
    lora: LoraSettings = session.settings
    training = session.recipe.training
    InputError.check(wrong_halves(training.batch_size * session.world.size, session.world.size))
    half = replace(session.recipe, training=replace(training, batch_size=training.batch_size // 2))
    halved = replace(session, recipe=half)
    own, held_out = loaders(halved)
    options = {"sources": lora.prior_data_dir, "flag": named("prior_data_dir")}
    prior = halved.loader(seed=training.seed, shuffle=True, **options)
    return MixedLoader(own, prior, lora.prior_weight), held_out


@settings
class NetworkLora(LoraSettings):
    """A LoRA of the network in ``model_path``."""

    model_path: str = option(
        "", "checkpoint of the network to adapt, ema_….pt or model….pt, with its settings", free=True
    )


@settings
class GeneratorLora(NetworkLora, GeneratorRun):
    """Settings of ``train_lora.py`` for a generator."""

    kind: ClassVar[str] = "generator_lora"

    def faults(self) -> Iterator[Fault]:
        if self.prior_target == "base" and is_bound(LOSSES[self.diffusion.loss_type]):
            loss = f"{named('loss_type')} {self.diffusion.loss_type}"
            rule = f"{loss} compares distributions, not predictions: set it to images, or the loss to rescaled_mse"
            yield Fault("prior_target", f"is base, but {rule}")
        yield from super().faults()


@settings
class ClassifierLora(NetworkLora, ClassifierRun):
    """Settings of ``train_lora.py`` for a classifier."""

    kind: ClassVar[str] = "classifier_lora"
    no_prior: ClassVar[str] = "a contrastive loss has no weights of samples"


@settings
class DecoderLora(NetworkLora, DecoderRun):
    """Settings of ``train_lora.py`` for U-Nets of a decoder."""

    kind: ClassVar[str] = "decoder_lora"
    no_prior: ClassVar[str] = "decoders are trained without such images"

    def faults(self) -> Iterator[Fault]:
        if self.check:
            yield Fault("check", "is set, but it describes the training of whole decoders: leave it out")
        yield from super().faults()

    @property
    def adapted_names(self) -> tuple[str, ...]:
        return tuple(self.decoder.names[i] for i in self.trained)


@settings
class CascadeLora(LoraSettings):
    """A LoRA of a stage of a latent cascade, by the documented keys."""

    base_setting: ClassVar[str] = "generator_checkpoint_path"
    renamed: ClassVar[Mapping[str, str]] = {**RENAMED, "init_checkpoint": "lora_checkpoint_path"}
    initial_weights: ClassVar[str | None] = None  # generator_checkpoint_path is the base

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.prior_data_dir and cast(Any, self).latents_path:
            other = named("latents_path")
            yield Fault("prior_data_dir", f"and {other} exclude each other: leave one of them out")

    @property
    def trains_text(self) -> bool:
        return bool(self.train_tokens)

    @classmethod
    def completed(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        check_imported(cls.kind, tree)  # before the base's settings are read
        return super().completed(tree)


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
