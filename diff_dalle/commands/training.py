"""What every training command does: from its settings to data, trainees and the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from ..checkpoints.checkpoint import Identity
from ..checkpoints.kinds import find_kind
from ..checkpoints.run_folder import choose_logdir, open_run
from ..config import to_dict
from ..data.loader import DataConfig, Loader
from ..distributed.world import World
from ..errors import InputError
from ..images.transforms import Window
from ..models.layers import to_channels_last
from ..text.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from ..tracking.tracker import Tracker
from ..tracking.trackers import TrackingConfig, create_trackers
from ..training.loop import EVALUATION_SEED, TrainingConfig, TrainLoop
from ..training.optim import OptimConfig
from ..training.trainee import Trainee


class TrainingRun:
    """Mixed into the config of a training command, which has the sections named here and these properties.

    kind:        what is trained, as its checkpoints call it.
    image_size:  side in pixels of the training images.
    window:      the part of them that is trained on; None = all.
    text_length: tokens of a caption.
    has_text, num_classes: which conditions the samples need.
    sample_interval: steps between previews; 0 = none.

    To add something to train: such a config with ``build_trainees``, and a script that hands it to ``train``.
    """

    kind: ClassVar[str]
    image_size: int
    text_length: int
    has_text: bool = True
    num_classes: int = 0
    window: Window | None = None
    sample_interval: int = 0
    data: DataConfig
    tokenizer: TokenizerConfig
    training: TrainingConfig
    tracking: TrackingConfig

    def check_world(self, world: World) -> None:
        """InputError for what so many processes cannot train."""

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        """What is trained. shown: samples whose conditions previews may use."""
        raise TypeError(f"{type(self).__name__} does not define build_trainees(tokenizer, shown, world)")

    def identity(self, tokenizer: Tokenizer | None) -> Identity:
        """What the run's checkpoints say about themselves: all but where they lie, which is no property of theirs."""
        config = to_dict(self)
        del config["training"]["logdir"]
        return Identity(self.kind, config, tokenizer.identity if tokenizer else None)

    def check_annealing(self, optim: OptimConfig) -> None:
        """InputError for steps at a learning rate of 0."""
        last, steps = self.training.iterations, optim.lr_anneal_steps
        if 0 < steps < last:
            raise InputError(f"lr_anneal_steps is {steps}, so the learning rate would be 0 for the rest of the "
                             f"{last:,} iterations: set --iterations {steps}, or raise lr_anneal_steps")  # fmt: skip

    def build_tokenizer(self) -> Tokenizer | None:
        """The run's tokenizer, or None without text."""
        return load_tokenizer(self.tokenizer.bpe_path) if self.has_text else None

    def build_model(self, tokenizer: Tokenizer | None) -> nn.Module:
        """The network with its initial weights, the same for the same seed on every rank."""
        torch.manual_seed(self.training.seed)
        kind = find_kind(self.kind)
        return to_channels_last(kind.build(kind.settings_of(self), tokenizer.vocab_size if tokenizer else 0))

    def build_loader(self, tokenizer: Tokenizer | None, world: World) -> Loader:
        """The training data, in the order that the seed fixes. InputError when ``data_dir`` is not set or empty."""
        if not self.data.data_dir:
            raise InputError("--data_dir is needed: a folder of shards, a tar, a glob, a brace range or a URL")
        return self._loader(self.data, tokenizer, world, seed=self.training.seed, shuffle=True)

    def build_held_out(self, tokenizer: Tokenizer | None, world: World) -> Loader | None:
        """The held-out data in the order of its shards, unflipped and, but for a ``window``, uncropped; None without
        ``val_data_dir``. It does not depend on the run's seed."""
        if not self.training.val_data_dir:
            return None
        plain = replace(self.data, random_crop=False, random_flip=False)
        sources = {"sources": self.training.val_data_dir, "flag": "--val_data_dir", "seed": EVALUATION_SEED}
        return self._loader(plain, tokenizer, world, shuffle=False, **sources)

    def _loader(self, config: DataConfig, tokenizer: Tokenizer | None, world: World, **options) -> Loader:
        return Loader(
            config,
            self.image_size,
            tokenizer,
            self.text_length,
            batch_size=self.training.batch_size,
            rank=world.rank,
            world_size=world.size,
            num_classes=self.num_classes,
            window=self.window,
            device=world.device,
            **options,
        )


def train(run: TrainingRun, world: World) -> None:
    """Train what ``run`` describes until one of its limits, or continue it where its log directory says.

    Raises InputError for data that cannot be used and a log directory that holds another run.
    """
    run.check_world(world)
    logdir = world.broadcast(choose_logdir(run.training.logdir) if world.is_main else None)
    world.print(f"Logs and checkpoints: {logdir}")

    tokenizer = run.build_tokenizer()
    data, held_out = run.build_loader(tokenizer, world), run.build_held_out(tokenizer, world)
    folder = world.broadcast(open_run(logdir, run.identity(tokenizer), type(run)) if world.is_main else None)
    trainees = run.build_trainees(tokenizer, held_out or data, world)

    loop = TrainLoop(run.training, trainees, data, folder, world, held_out, run.sample_interval)
    tracker = Tracker()
    if world.is_main:
        tracker = create_trackers(run.tracking, logdir, to_dict(run), loop.step, loop.total_steps)
    loop.run(tracker)
    world.print(f"Trained for {loop.step:,} steps. Logs and checkpoints: {logdir}")
