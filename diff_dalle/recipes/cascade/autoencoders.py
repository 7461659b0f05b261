"""Training the two autoencoders of a latent cascade: stage A, and the semantic encoder with its previewer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...config import Fault, InputError, named, option, section, settings
from ...data.loader import Loader
from ...data.spec import ImageSpec, SampleSpec
from ...distributed.parallel import build_shared
from ...distributed.world import World
from ...evaluation.pretrained import Lpips
from ...models.latent.discriminator import Discriminator
from ...models.latent.semantic import SEMANTIC_SIZES, SemanticAutoencoder, SemanticConfig
from ...models.latent.stage_a import STAGE_A_SIZES, StageA, StageAConfig
from ...models.layers import to_channels_last
from ...tasks.autoencoding import DISCRIMINATOR, AutoencodingConfig, AutoencodingTask
from ...tasks.semantic import SemanticTask, SemanticTaskConfig
from ...text.tokenizer import Tokenizer
from ..recipe import Recipe, Session
from .file import CascadeRun


def version_of(sizes: Mapping[str, Any]) -> Any:
    """The setting ``model_version`` of an autoencoder."""
    return option(None, "network size, which model may override; none = as in model", choices=sizes)


@settings
class StageARun(CascadeRun):
    """Settings of ``train_cascade.py`` with ``kind: stage_a``."""

    kind: ClassVar[str] = "stage_a"
    sizes: ClassVar[Mapping[str, Any]] = STAGE_A_SIZES

    model_version: str | None = version_of(STAGE_A_SIZES)
    model: StageAConfig = section(StageAConfig, flags=False)
    autoencoding: AutoencodingConfig = section(AutoencodingConfig, flags=False)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        config = self.autoencoding
        least = 2**config.discriminator.discriminator_depth
        if config.adversarial_weight and self.image_size <= least:
            lower = f"lower {named('autoencoding.discriminator.discriminator_depth')}"
            rule = f"the discriminator needs more than {least} pixels on each side: {lower}"
            yield Fault.of(self, "image_size", rule)

    def session(self, recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
        config, optim = self.autoencoding, recipe.optims[""]
        optims = {"": optim}
        if config.adversarial_weight:
            rate = config.discriminator_lr or self.lr
            optims[DISCRIMINATOR] = replace(optim, lr=rate, weight_decay=0.0, ema_rate=())

        def task(model: StageA, name: str, shown: Loader) -> AutoencodingTask:
            discriminator: Discriminator | None = None
            perceptual: Lpips | None = None
            if config.adversarial_weight:
                discriminator = cast(Discriminator, to_channels_last(build_shared(self._discriminator, world)))
            if config.lpips_weight:
                perceptual = Lpips(config.lpips_net, config.lpips_path, world.device, "autoencoding.lpips_path")
            images = shown_images(recipe, world, self, shown, passes=2)
            return AutoencodingTask(model, config, discriminator, self.loop.seed, perceptual, images)

        return Session(recipe, world, image_spec(self), task, optims={"": optims})

    def _discriminator(self) -> Discriminator:
        torch.manual_seed(self.loop.seed)
        return Discriminator(self.autoencoding.discriminator)


@settings
class SemanticRun(CascadeRun):
    """Settings of ``train_cascade.py`` with ``kind: semantic``."""

    kind: ClassVar[str] = "semantic"
    sizes: ClassVar[Mapping[str, Any]] = SEMANTIC_SIZES

    model_version: str | None = version_of(SEMANTIC_SIZES)
    model: SemanticConfig = section(SemanticConfig, flags=False)
    autoencoding: SemanticTaskConfig = section(SemanticTaskConfig, flags=False)

    def session(self, recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
        if self.model.backbone != "conv" and not self.generator_checkpoint_path:
            rule = f"is {self.model.backbone}, which is not trained, but there are no weights for it"
            remedy = "write a checkpoint with them by import_cascade.py and give it as"
            setting = named("generator_checkpoint_path")
            raise InputError(Fault("model.backbone", f"{rule}: {remedy} {setting}"))

        def task(model: SemanticAutoencoder, name: str, shown: Loader) -> SemanticTask:
            images = shown_images(recipe, world, self, shown, passes=1)
            return SemanticTask(model, self.autoencoding, images)

        return Session(recipe, world, image_spec(self), task)


def image_spec(run: CascadeRun) -> SampleSpec:
    return SampleSpec(ImageSpec((run.image_size, run.image_size)))


def shown_images(recipe: Recipe, world: World, run: CascadeRun, shown: Loader, passes: int) -> Tensor | None:
    """The images of the previews of an autoencoder, as many as ``affordable``. passes: of the network, per image."""
    if not recipe.sample_interval:
        return None
    count, _ = recipe.affordable(world, run.loop.preview_samples, each=passes)
    return shown.first(count).images
