"""A training run in the terms that all kinds share: a recipe, and the session that it becomes once its parts are open.

A kind translates its settings into a recipe. What trains the same network in another way, such as a LoRA, is a function
from a recipe to a recipe.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, BinaryIO, TypeVar

import torch
from torch import nn

from ..checkpoints.checkpoint import Identity
from ..checkpoints.kind import NetworkKind
from ..checkpoints.run_folder import RunFolder
from ..config import Fault, InputError, Spelling, as_flag, leaves, named, quantity, redacted, spelled, to_dict
from ..data.loader import DataConfig, Loader
from ..data.spec import SampleSpec
from ..distributed.launch import DistributedConfig
from ..distributed.parallel import Parts, build_sharded, build_shared, shard
from ..distributed.world import World
from ..embeddings.contract import Clip
from ..models.layers import to_channels_last
from ..models.precision import DTYPES, training_precision
from ..models.units import compile_training, is_compiled, parts_of
from ..text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from ..tracking.trackers import TrackingConfig, check_trackers
from ..training.loop import EVALUATION_SEED
from ..training.saving import FilesWithWeights
from ..training.settings import OptimConfig, TrainingConfig
from ..training.task import Task
from ..training.trainee import Trainee


def spelling_of(config_class) -> Spelling:
    """What users of a command call a setting: its flag; of a command that a file sets, its key at the root, its path,
    or what ``renamed`` of the class says, a mapping of flags that only other commands have."""
    renamed = getattr(config_class, "renamed", None)
    if renamed is None:
        return as_flag
    found = list(leaves(config_class))
    counts = Counter(leaf.path[-1] for leaf in found)
    names = {leaf.path[-1]: ".".join(leaf.path) for leaf in found if leaf.in_file and counts[leaf.path[-1]] == 1}
    names |= {leaf.path[0]: leaf.path[0] for leaf in found if len(leaf.path) == 1} | dict(renamed)
    return lambda setting: names.get(setting, setting)


@contextlib.contextmanager
def spelled_as_in_file(config_class) -> Iterator[None]:
    """InputErrors of the block name settings as the file of this command does, if it is set by one."""
    try:
        yield
    except InputError as error:
        if not hasattr(config_class, "renamed"):
            raise
        sentences = (fault.sentence(spelling_of(config_class)) for fault in error.faults)
        error.faults = tuple(Fault("", sentence) for sentence in sentences)
        raise


# Forward passes that a sample takes in a training step: a backward pass computes about twice as much as a forward pass
# (Kaplan et al. 2020, section 2.1).
TRAINED = 3

Config = TypeVar("Config")
Exports = dict[str, Callable[[BinaryIO], object]]


@dataclass(frozen=True)
class Recipe:
    """A training run before anything is opened.

    settings:     of the kind ``settings.kind``, as checkpoints record them.
    network:      the settings of its networks.
    optims:       of each network by its name, "" where there is one; also of those that are not trained.
    opening:      opens the frozen networks, the shards and whatever else decides what is trained; every rank calls it,
                  with the tokenizer that reads captions, None = the run's own.
    has_text:     a tokenizer of ours, ``settings.tokenizer``, reads the captions.
    sample_interval: steps between previews, of which the last step has one too; 0 = none.
    preview_share: most that they may take of the run, see ``affordable``; None = no limit.
    epoch_samples: samples per epoch, for the names of saved files; 0 = those of the data.
    check:        raises InputError, before anything is written, for what cannot be trained, or not by so many
                  processes.
    is_replaced:  whether another run in the log directory is to be replaced. Rank 0 calls it. InputError if the run
                  must not go on with what is there.
    present:      the run in the log directory, once that is known, unless it is to be replaced.
    """

    settings: Any
    network: NetworkKind
    training: TrainingConfig
    optims: Mapping[str, OptimConfig]
    data: DataConfig
    tracking: TrackingConfig
    distributed: DistributedConfig
    opening: Callable[[Recipe, World, Tokenizer | None], Session]
    has_text: bool = False
    sample_interval: int = 0
    preview_share: float | None = None
    epoch_samples: int = 0
    check: Callable[[Recipe, World], None] = lambda recipe, world: None
    is_replaced: Callable[[str], bool] = lambda logdir: False
    present: RunFolder | None = None

    @property
    def microbatch(self) -> int:
        """Samples per forward pass."""
        return self.training.microbatch or self.training.batch_size

    def tokenizer(self) -> Tokenizer | None:
        if not self.has_text:
            return None
        config: TokenizerConfig = self.settings.tokenizer
        return load_tokenizer(config.bpe_path)

    def open(self, world: World) -> Session:
        """Raises InputError for what is not there, does not fit, or cannot be trained by this many processes."""
        self.check(self, world)
        session = self.opening(self, world, None)
        for optim in session.recipe.optims.values():
            InputError.check(wrong_annealing(session.recipe.training, optim, world.size))
        return session

    def affordable(
        self, world: World, images: int, steps: int = 1, each: float = 1, once: float = 0, name: str = ""
    ) -> tuple[int, int]:
        """The number of images and of sampling steps of every preview: those that are asked for, or fewer of both where
        all previews would take more than ``preview_share`` of the run, which is printed. At least 1 each.

        Counted are forward passes of a training sample on one process, since each makes all previews.

        each: passes per image and step. once: those per image beside these. name: of the network.
        """
        training, share = self.training, self.preview_share
        if share is None:
            return images, steps
        total, interval = training.last_step(world.size), self.sample_interval
        between = interval if total is None else total / -(-total // interval)  # steps of each preview
        limit = share * TRAINED * training.batch_size * between
        asked = images * (once + steps * each)
        if asked <= limit:
            return images, steps
        few = max(1, int(steps * math.sqrt(limit / asked)))  # both by the same factor
        count = min(images, max(1, int(limit / (once + few * each))))
        few = min(steps, max(1, int((limit / count - once) / each)))
        if (count, few) != (images, steps):
            shown = [f"{count} of {quantity(images, 'image')}"] if count < images else []
            shown += [f"{few} of {quantity(steps, 'sampling step')}"] if few < steps else []
            setting = spelled(named("preview_share"), spelling_of(type(self.settings)))
            owner = f" of {name}" if name else ""
            every = _rounded_up(share * asked / limit)
            world.print(
                f"Previews{owner} have {' and '.join(shown)}, so that they take at most {100 * share:g}% of the run; "
                f"{setting} {every:g} would give them all."
            )
        return count, few

    def check_packages(self) -> None:
        """InputError for an optional package that the run needs and that is not installed."""
        with spelled_as_in_file(type(self.settings)):
            check_trackers(self.tracking)

    def of(self, settings: Any) -> Recipe:
        """The recipe with other settings to be recorded."""
        return replace(self, settings=settings)

    def replayed(self, batch: int, share: int, logdir: str, data_dir: tuple[str, ...]) -> Recipe:
        """The run for one process that takes global batches of this size in the pieces that its processes took.

        share: the size of a piece. data_dir: in place of the run's, if given.
        """
        training = replace(
            self.training,
            batch_size=batch,
            microbatch=min(self.training.microbatch or share, share),
            logdir=logdir,
            accept_changed_batch=True,  # what counts is the batch of the step and of those before it
        )
        data = replace(self.data, num_workers=0, data_dir=data_dir or self.data.data_dir)
        return replace(self, training=training, data=data, sample_interval=0)


@dataclass(frozen=True)
class Session:
    """A run whose parts are open.

    recipe:    with what was found out in opening.
    tokenizer: of ours that reads the captions, if any.
    spec:      what a training sample must hold; nothing else is read from the shards.
    task:      what trains a network, given the network, its name, and samples whose conditions previews show.
    initial:   a network of a name as it is to be trained: on the device, with its initial weights, equal on all ranks;
               torch's generator is seeded with the run's seed. None = one with random weights.
    start:     overwrites what a new network does not start from at random.
    names:     of the networks that are trained.
    optims:    in place of the recipe's: of networks whose task has several, by its parts.
    frozen:    networks by name that are not trained but belong to the model that is saved.
    exports:   files beside each checkpoint of a trainee, by ROLE.EXTENSION: functions that write them, in the
               background, given what its files with weights hold, by role.
    measure:   makes more values for each evaluation of the trainees, see ``TrainLoop``; None = there are none.
    loaders:   opens the training data, in an order determined by the seed, and the held-out data, in the order of its
               shards and without augmentation except a window; None = the loaders of ``recipe.data``.
    meta:      the texts that configure the run, by file name, for savers; none = its settings.
    text_clip: the CLIP that encodes the captions outside of the network, if any.
    is_text_recorded: the run's checkpoints hold its tokenizer.
    """

    recipe: Recipe
    world: World
    spec: SampleSpec
    task: Callable[[Any, str, Loader], Task]
    tokenizer: Tokenizer | None = None
    initial: Callable[[str], nn.Module] | None = None
    start: Callable[[Any], None] = lambda network: None
    names: Sequence[str] = ("",)
    optims: Mapping[str, Mapping[str, OptimConfig]] = field(default_factory=dict)
    frozen: Mapping[str, nn.Module] = field(default_factory=dict)
    exports: Callable[[Trainee, FilesWithWeights], Exports] = lambda trainee, files: {}
    measure: Callable[[Sequence[Trainee]], Callable[[], dict[str, float]]] | None = None
    loaders: Callable[[Session], tuple[Any, Loader | None]] | None = None
    meta: Mapping[str, str] = field(default_factory=dict)
    text_clip: Clip | None = None
    is_text_recorded: bool = True

    @property
    def settings(self) -> Any:
        return self.recipe.settings

    # ------------------------------------------------------------------------------------------------------- networks

    def network(self, name: str = "") -> nn.Module:
        """A network to be trained with its initial weights, a function of the seed. Every rank calls it."""
        training, world = self.recipe.training, self.world
        if self.initial is not None:
            torch.manual_seed(training.seed)
            model = self.initial(name)
        elif self._is_sharded:
            return build_sharded(partial(self._initial, name), self._parts, world, training.sharding)
        else:
            model = to_channels_last(build_shared(partial(self._initial, name), world))
        return self._compiled(model)

    def _compiled(self, network: nn.Module) -> nn.Module:
        """The network, whose blocks are compiled in training where the run says so."""
        if is_compiled(self.recipe.training.compile, self.world.device):
            compile_training(network, dynamic=None if self.recipe.data.aspect.multi_aspect_ratio else False)
        return network

    def _initial(self, name: str) -> nn.Module:
        torch.manual_seed(self.recipe.training.seed)
        network = self.recipe.network.build(self.tokenizer.vocab_size if self.tokenizer else 0, name)
        if not next(network.parameters()).is_meta:  # other ranks get rank 0's values
            self.start(network)
        return network

    def ready_frozen(self, network: nn.Module) -> nn.Module:
        """A network that is not trained but passes gradients on, equal on all ranks: divided among them in place if
        weights are sharded, and compiled as the trained one."""
        if self._is_sharded:
            network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing in torch's stubs
            shard(network, self._parts(network), self.world, self.recipe.training.sharding)
        return self._compiled(network)

    def beside(self, build: Callable[[], nn.Module]) -> nn.Module:
        """A small network that is trained beside the one that is saved, with rank 0's initial values, sharded likewise.
        Every rank calls it."""
        if self._is_sharded:
            return build_sharded(build, self._parts, self.world, self.recipe.training.sharding)
        return build_shared(build, self.world)

    @property
    def _is_sharded(self) -> bool:
        return self.world.size > 1 and self.recipe.training.sharding.parallel != "ddp"

    def _parts(self, network: nn.Module) -> Parts:
        return parts_of(network, DTYPES.get(training_precision(self.recipe.training.precision, self.world.device)))

    def trainees(self, shown: Loader) -> list[Trainee]:
        """What is trained. shown: samples whose conditions previews use."""
        found = []
        for name in self.names:
            optim = self.optims.get(name, self.recipe.optims[name])
            task = self.task(self.network(name), name, shown)
            found.append(Trainee(task, optim, self.recipe.training.precision, self.world, name))
        return found

    # ----------------------------------------------------------------------------------------------------------- data

    @cached_property
    def both_loaders(self) -> tuple[Any, Loader | None]:
        """Training and held-out data. InputError when ``data_dir`` is unset or empty."""
        return (self.loaders or standard_loaders)(self)

    def loader(self, **options: Any) -> Loader:
        return open_loader(self.recipe, self.world, **{"spec": self.spec, **options})

    def identity(self) -> Identity:
        """What the run's checkpoints say about their origin: all settings except their location, without secrets."""
        settings, tokenizer = self.settings, self.tokenizer
        config = settings.without_place(redacted(to_dict(settings)))
        if tokenizer is None or not self.is_text_recorded:
            return Identity(settings.kind, config)
        vocabulary = tokenizer.vocabulary.text() if settings.tokenizer.bpe_path else ""
        return Identity(settings.kind, config, tokenizer.identity, vocabulary)


def open_loader(recipe: Recipe, world: World, **options: Any) -> Loader:
    """Samples of ``recipe.data``; options: of ``Loader``, in place of the run's."""
    share = {"batch_size": recipe.training.batch_size, "rank": world.slot, "world_size": world.size}
    return Loader(recipe.data, **{"device": world.device, "world": world, **share, **options})


def standard_loaders(session: Session) -> tuple[Loader, Loader | None]:
    """The loaders of ``recipe.data``, and of ``training.val_data_dir``, independent of the run's seed."""
    recipe = session.recipe
    if not recipe.data.data_dir:
        raise InputError(Fault("data_dir", "is required: a folder of shards, a tar, a glob, a brace range or a URL"))
    data = session.loader(seed=recipe.training.seed, shuffle=True)
    if not recipe.training.val_data_dir:
        return data, None
    options: dict[str, Any] = {"sources": recipe.training.val_data_dir, "flag": named("val_data_dir")}
    options["spec"] = session.spec.whole
    if recipe.data.aspect.multi_aspect_ratio:  # the blocks of an evaluation have one size each
        options |= {"batch_size": Task.held_out_block, "rank": 0, "world_size": 1}
    return data, session.loader(seed=EVALUATION_SEED, shuffle=False, augment=False, **options)


def _rounded_up(value: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit) * unit, 12)


def translated(kind: type[Config], section: Any, **others: Any) -> Config:
    """Settings of another room, in the words of a section that calls some of them by the same names. others: the rest,
    and what of the section means something else."""
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]  # all settings are dataclasses
    return kind(**{each.name: getattr(section, each.name) for each in fields(section) if each.name in names} | others)


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with others in their place, section by section."""
    found = copy.deepcopy(dict(below))
    for key, value in above.items():
        inner = found.get(key)
        found[key] = overlaid(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return found


def without_logdir(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run without where it is."""
    del config["training"]["logdir"]
    return config


def wrong_annealing(training: TrainingConfig, optim: OptimConfig, processes: int | None = None) -> Iterator[Fault]:
    """Steps at learning rate 0. processes: None = not known yet, and with it the number of steps that ``samples``
    stands for."""
    steps = optim.lr_anneal_steps
    if not steps or (training.samples and processes is None):
        return
    last = training.last_step(processes or 1)
    if last is None or steps < last:
        rest = "the rest of its hours" if last is None else f"the rest of the {last:,} iterations"
        remedy = f"set {named('iterations')} {steps} or raise {named('lr_anneal_steps')}"
        yield Fault("lr_anneal_steps", f"is {steps}, so the learning rate would be 0 for {rest}: {remedy}")


def check_same(found: str, recorded: str, setting: str, path: str) -> None:
    """InputError when a run goes on with other weights of a frozen network."""
    if recorded and recorded != found:
        rule = f"is {path}, whose weights are {found}, but the run was begun with {recorded}: give those"
        raise InputError(Fault(setting, rule))
