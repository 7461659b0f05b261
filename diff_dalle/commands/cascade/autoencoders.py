"""Training the two autoencoders of a latent cascade: stage A, and the semantic encoder with its previewer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch

from ...config import option, section, settings
from ...data.loader import Loader
from ...distributed.parallel import build_shared
from ...distributed.world import World
from ...errors import Fault, InputError, named
from ...evaluation.perceptual import Lpips
from ...models.latent.discriminator import Discriminator
from ...models.latent.semantic import SEMANTIC_SIZES, SemanticAutoencoder, SemanticConfig
from ...models.latent.stage_a import STAGE_A_SIZES, StageA, StageAConfig
from ...models.layers import to_channels_last
from ...tasks.autoencoding import DISCRIMINATOR, AutoencodingConfig, AutoencodingTask
from ...tasks.semantic import SemanticTask, SemanticTaskConfig
from ...text.tokenizer import Tokenizer
from ...training.trainee import Trainee
from .run import CascadeRun


@settings
class StageARun(CascadeRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_a``."""

    kind: ClassVar[str] = "stage_a"
    sizes: ClassVar[Mapping[str, Any]] = STAGE_A_SIZES

    model_version: str | None = option(
        None,
        "size of the network, which model may change; none = what model says",
        choices=STAGE_A_SIZES,
    )
    model: StageAConfig = section(StageAConfig, flags=False)
    autoencoding: AutoencodingConfig = section(AutoencodingConfig, flags=False)

    def wrong_sizes(self, multiple: int) -> Iterator[Fault]:
        yield from super().wrong_sizes(multiple)
        config = self.autoencoding
        least = 2**config.discriminator.discriminator_depth
        if config.adversarial_weight and self.image_size <= least:
            lower = f"lower {named('autoencoding.discriminator.discriminator_depth')}"
            rule = f"the discriminator needs more than {least} pixels on each side: {lower}"
            yield Fault.of(self, "image_size", rule)

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        config, optims = self.autoencoding, {"": self.optim}
        discriminator: Discriminator | None = None
        perceptual: Lpips | None = None
        if config.adversarial_weight:
            discriminator = cast(Discriminator, to_channels_last(build_shared(self._discriminator, world)))
            optims[DISCRIMINATOR] = replace(
                self.optim, lr=config.discriminator_lr or self.lr, weight_decay=0.0, ema_rate=()
            )
        if config.lpips_weight:
            setting = "autoencoding.lpips_path"
            perceptual = Lpips(config.lpips_net, config.lpips_path, world.device, setting)
        model = cast(StageA, self.build_model(None, world))
        images = self.shown_images(shown)
        task = AutoencodingTask(model, config, discriminator, self.loop.seed, perceptual, images)
        return [Trainee(task, optims, self.training.precision, world)]

    def _discriminator(self) -> Discriminator:
        torch.manual_seed(self.loop.seed)
        return Discriminator(self.autoencoding.discriminator)


@settings
class SemanticRun(CascadeRun):
    """Settings of ``train_cascade.py`` with ``kind: semantic``."""

    kind: ClassVar[str] = "semantic"
    sizes: ClassVar[Mapping[str, Any]] = SEMANTIC_SIZES

    model_version: str | None = option(
        None,
        "size of the network, which model may change; none = what model says",
        choices=SEMANTIC_SIZES,
    )
    model: SemanticConfig = section(SemanticConfig, flags=False)
    autoencoding: SemanticTaskConfig = section(SemanticTaskConfig, flags=False)

    def check_world(self, world: World) -> None:
        super().check_world(world)
        if self.model.backbone != "conv" and not self.generator_checkpoint_path:
            rule = f"is {self.model.backbone}, which is not trained, but there are no weights for it"
            remedy = "write a checkpoint with them by import_cascade.py and give it as"
            setting = named("generator_checkpoint_path")
            raise InputError(Fault("model.backbone", f"{rule}: {remedy} {setting}"))

    def build_trainees(self, tokenizer: Tokenizer | None, shown: Loader, world: World) -> list[Trainee]:
        model = cast(SemanticAutoencoder, self.build_model(None, world))
        task = SemanticTask(model, self.autoencoding, self.shown_images(shown))
        return [Trainee(task, self.optim, self.training.precision, world)]
