"""What all training commands share: from settings to data, trainees and the loop."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO, ClassVar, cast

import torch
from torch import nn

from ..checkpoints.checkpoint import Identity
from ..checkpoints.kinds import find_kind
from ..checkpoints.run_folder import choose_logdir, open_run
from ..checkpoints.run_lock import RunLock, hold
from ..config import redacted, to_dict
from ..data.fingerprint import Fingerprint, check_ranks
from ..data.loader import DataConfig, Loader
from ..data.spec import CaptionSpec, ImageSpec, SampleSpec
from ..distributed.launch import DistributedConfig
from ..distributed.parallel import build_shared
from ..distributed.sharding import Parts, build_sharded, shard
from ..distributed.world import World
from ..errors import Fault, InputError, named
from ..images.transforms import Window
from ..models.compiling import compile_training
from ..models.layers import to_channels_last
from ..models.precision import DTYPES, training_precision
from ..models.units import parts_of
from ..text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from ..tracking.tracker import Tracker
from ..tracking.trackers import TrackingConfig, check_trackers, create_trackers
from ..training.loop import EVALUATION_SEED, TrainLoop
from ..training.optim_config import OptimConfig
from ..training.saving import FilesWithWeights
from ..training.settings import TrainingConfig
from ..training.task import Task
from ..training.trainee import Trainee
from .spelling import spelled_as_in_file
from .starting import with_loaded, with_streams


class TrainingRun(ABC):
    """Base of the config of a training command, a dataclass with at least the sections annotated here.

    kind: what is trained, as its checkpoints say.

    To train something new: such a config with ``build_trainees``, and a script that passes it to ``train``.
    """

    kind: ClassVar[str]
    data: DataConfig
    tokenizer: TokenizerConfig
    optim: OptimConfig
    training: TrainingConfig
    tracking: TrackingConfig
    distributed: DistributedConfig

    def faults(self) -> Iterator[Fault]:
        """What is wrong between the sections."""
        return iter(())

    @property
    def network_kind(self) -> str:
        """The kind of its networks; an entry of checkpoints.kinds.KINDS."""
        return self.kind

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Width and height of the training images in pixels."""

    @property
    def image_channels(self) -> int:
        """3 = RGB, 1 = grayscale."""
        return 3

    @property
    def text_length(self) -> int:
        """Tokens per caption; 0 = no tokenizer of ours reads text."""
        return 0

    @property
    def has_text(self) -> bool:
        """Whether samples must have a caption."""
        return self.text_length > 0

    @property
    def num_classes(self) -> int:
        """Number of classes, if samples must have one; else 0."""
        return 0

    @property
    def window(self) -> Window | None:
        """The crop that is trained on; None = whole images."""
        return None

    @property
    def sample_interval(self) -> int:
        """Steps between previews; 0 = none."""
        return 0

    @property
    def optims(self) -> tuple[OptimConfig, ...]:
        """The optimizers."""
        return (self.optim,)

    @property
    def data_config(self) -> DataConfig:
        """The shards and how they are read."""
        return self.data

    @property
    def launching(self) -> DistributedConfig:
        """The processes and devices."""
        return self.distributed

    def check_folder(self, logdir: str) -> None:  # noqa: B027  (optional)
        """InputError if the run must not go on with what is in its log directory. Rank 0 calls it, and it may remove
        another run."""

    def starting_from(self, weights: tuple[str, ...]) -> TrainingRun:
        """The run with these files as its ``init_checkpoint``."""
        training = replace(self.training, init_checkpoint=weights)
        return replace(cast(Any, self), training=training)

    def replayed(self, batch: int, share: int, logdir: str, data_dir: tuple[str, ...]) -> TrainingRun:
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
        return replace(cast(Any, self), training=training, data=data)  # a dataclass, as this base is not

    def on(self, processes: int) -> TrainingRun:
        """The run on this many processes."""
        return self

    def holding(self, **found: Any) -> Any:
        """The run with what was found for it, by attribute: settings, or class variables, which no file sets."""
        run = copy.copy(self)
        vars(run).update(found)
        return run

    def resolved(self) -> TrainingRun:
        """The run with the settings that follow from others, as dry runs print it."""
        return self

    def settled(self, world: World) -> TrainingRun:
        """The run with all that depends on the data and the number of processes. Every rank calls it, once."""
        return self.resolved()

    @property
    def epoch_samples(self) -> int:
        """Samples per epoch, for the names of saved files; 0 = those of the data."""
        return 0

    @property
    def meta(self) -> dict[str, str]:
        """The texts that configure the run, by file name, for savers; none = its settings."""
        return {}

    def frozen(self) -> dict[str, nn.Module]:
        """Networks by name that are not trained but belong to the model that is saved."""
        return {}

    def exports(self, trainee: Trainee, files: FilesWithWeights) -> dict[str, Callable[[BinaryIO], object]]:
        """Files beside each checkpoint of a trainee, by ROLE.EXTENSION: functions that write them, in the background.
        files: what its files with weights hold, by role."""
        return {}

    def measure(self, trainees: Sequence[Trainee], world: World) -> Callable[[], dict[str, float]] | None:
        """More values for each evaluation, see ``TrainLoop``."""
        return None

    @abstractmethod
    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        """What is trained. shown: samples whose conditions previews use."""

    def check_packages(self) -> None:
        """InputError for an optional package that the run needs and that is not installed. Rank 0 calls it."""
        with spelled_as_in_file(type(self)):
            check_trackers(self.tracking)

    def check_world(self, world: World) -> None:  # noqa: B027  (optional)
        """InputError if this many processes cannot train it."""

    def identity(self, tokenizer: Tokenizer | None) -> Identity:
        """What the run's checkpoints say about their origin: all settings except their location, without secrets."""
        config = self.without_place(redacted(to_dict(self)))
        if tokenizer is None:
            return Identity(self.kind, config)
        vocabulary = tokenizer.vocabulary.text() if self.tokenizer.bpe_path else ""
        return Identity(self.kind, config, tokenizer.identity, vocabulary)

    def without_place(self, config: dict[str, Any]) -> dict[str, Any]:
        """Settings without those that say where the run is."""
        del config["training"]["logdir"]
        return config

    def wrong_annealing(self, optim: OptimConfig, processes: int | None = None) -> Iterator[Fault]:
        """Steps at learning rate 0. processes: None = not known yet, and with it the number of steps that ``samples``
        stands for."""
        steps = optim.lr_anneal_steps
        if not steps or (self.training.samples and processes is None):
            return
        last = self.training.last_step(processes or 1)
        if last is None or steps < last:
            rest = "the rest of its hours" if last is None else f"the rest of the {last:,} iterations"
            remedy = f"set {named('iterations')} {steps} or raise {named('lr_anneal_steps')}"
            yield Fault("lr_anneal_steps", f"is {steps}, so the learning rate would be 0 for {rest}: {remedy}")

    def build_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer, or None without text."""
        return load_tokenizer(self.tokenizer.bpe_path) if self.has_text else None

    def build_model(self, tokenizer: Tokenizer | None, world: World | None = None, trainee: str = "") -> nn.Module:
        """The network of a trainee with its initial weights, a function of the seed. With a ``world``, every rank calls
        it."""
        settings, vocab_size = find_kind(self.network_kind).of_run(self), tokenizer.vocab_size if tokenizer else 0

        def build() -> nn.Module:
            torch.manual_seed(self.training.seed)
            network = settings.build(vocab_size, trainee)
            if not next(network.parameters()).is_meta:  # other ranks get rank 0's values
                self.initialize(network)
            return network

        if world and self._is_sharded(world):
            return build_sharded(build, partial(self._parts, world), world, self.training.sharding)
        model = to_channels_last(build_shared(build, world) if world else build())
        if self.training.compile:
            compile_training(model)
        return model

    def initialize(self, network: nn.Module) -> None:
        """Overwrite what a new network does not start from at random."""
        return

    def shard_frozen(self, network: nn.Module, world: World) -> nn.Module:
        """A network that is not trained, equal on all ranks: divided among them in place if weights are sharded."""
        if self._is_sharded(world):
            network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # missing in torch's stubs
            shard(network, self._parts(world, network), world, self.training.sharding)
        return network

    def _is_sharded(self, world: World) -> bool:
        return world.size > 1 and self.training.sharding.parallel != "ddp"

    def _parts(self, world: World, network: nn.Module) -> Parts:
        return parts_of(network, DTYPES.get(training_precision(self.training.precision, world.device)))

    def build_loader(self, tokenizer: Tokenizer | None, world: World) -> Loader:
        """The training data, in an order determined by the seed. InputError when ``data_dir`` is unset or empty."""
        if not self.data_config.data_dir:
            raise InputError(
                Fault("data_dir", "is required: a folder of shards, a tar, a glob, a brace range or a URL")
            )
        return self._loader(self.data_config, tokenizer, world, seed=self.training.seed, shuffle=True)

    def build_held_out(self, tokenizer: Tokenizer | None, world: World) -> Loader | None:
        """The held-out data in the order of its shards, without augmentation except a ``window``; None without
        ``val_data_dir``. Independent of the run's seed."""
        if not self.training.val_data_dir:
            return None
        flag = named("val_data_dir")
        options: dict[str, Any] = {"sources": self.training.val_data_dir, "flag": flag, "seed": EVALUATION_SEED}
        if self.data_config.aspect.multi_aspect_ratio:  # the blocks of an evaluation have one size each
            options |= {"batch_size": Task.held_out_block, "rank": 0, "world_size": 1}
        return self._loader(self.data_config, tokenizer, world, shuffle=False, augment=False, **options)

    def sample_spec(self, tokenizer: Tokenizer | None) -> SampleSpec:
        """What a training sample must hold. Nothing else is read from the shards."""
        image = ImageSpec((self.image_size, self.image_size), channels=self.image_channels, window=self.window)
        captions = (CaptionSpec(tokenizer, self.text_length),) if tokenizer else ()
        return SampleSpec(image, captions, self.num_classes)

    def _loader(self, config: DataConfig, tokenizer: Tokenizer | None, world: World, **options) -> Loader:
        share = {"batch_size": self.training.batch_size, "rank": world.slot, "world_size": world.size}
        return Loader(config, self.sample_spec(tokenizer), device=world.device, world=world, **{**share, **options})


def check_same(found: str, recorded: str, setting: str, path: str) -> None:
    """InputError when a run goes on with other weights of a frozen network."""
    if recorded and recorded != found:
        rule = f"is {path}, whose weights are {found}, but the run was begun with {recorded}: give those"
        raise InputError(Fault(setting, rule))


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with others in their place, section by section."""
    found = copy.deepcopy(dict(below))
    for key, value in above.items():
        inner = found.get(key)
        found[key] = overlaid(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return found


def train(run: TrainingRun, world: World) -> None:
    """Train what ``run`` describes until one of its limits, resuming from its log directory if it holds this run.

    Raises InputError for unusable data and for a log directory that holds another run.
    """
    with spelled_as_in_file(type(run)):
        run.check_world(world)
        world.on_main(run.check_packages)
        logdir = world.broadcast(choose_logdir(run.training.logdir) if world.is_main else None)
        world.print(f"Logs and checkpoints: {logdir}")
        with hold(logdir) if world.is_main else contextlib.nullcontext() as lock:
            _train(run, world, logdir, lock)


def _train(run: TrainingRun, world: World, logdir: str, lock: RunLock | None) -> None:
    if world.is_main:
        run.check_folder(logdir)
    run = with_streams(with_loaded(run, logdir, world), logdir, world).settled(world)
    for optim in run.optims:
        InputError.check(run.wrong_annealing(optim, world.size))
    tokenizer = run.build_tokenizer()
    data, held_out = run.build_loader(tokenizer, world), run.build_held_out(tokenizer, world)
    folder = world.broadcast(open_run(logdir, run.identity(tokenizer), type(run)) if world.is_main else None)
    folder.lock, folder.data = lock, {"data_dir": _fingerprint(data, named("data_dir"), world)}
    if held_out is not None:
        folder.data["val_data_dir"] = _fingerprint(held_out, named("val_data_dir"), world)
    trainees = run.build_trainees(tokenizer, held_out or data, world)

    save_best = any(saver.save_best_to is not None for saver in run.tracking.savers)
    loop = TrainLoop(
        run.training,
        trainees,
        data,
        folder,
        world,
        held_out,
        run.sample_interval,
        save_best,
        run.frozen(),
        run.measure(trainees, world),
        run.exports,
    )
    tracker = Tracker()
    if world.is_main:
        progress = loop.step, loop.total_steps, run.epoch_samples or data.samples
        tracker = create_trackers(run.tracking, logdir, redacted(to_dict(run)), *progress, run.meta)
    loop.run(tracker)
    world.print(f"Trained for {loop.step:,} steps. Logs and checkpoints: {logdir}")


def _fingerprint(data: Loader, flag: str, world: World) -> Fingerprint:
    """What identifies a loader's shards. InputError when the ranks see different ones."""
    shards = data.collection.shards
    found = Fingerprint.of([each.path for each in shards], [each.size for each in shards], data.collection.counts)
    check_ranks(world, found, flag)
    return found
