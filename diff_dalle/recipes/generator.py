"""Training a generator: a base generator, or an upsampler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ..checkpoints.pixels import GeneratorSettings
from ..config import Fault, faults_of, named, section, settings
from ..data.loader import DataConfig, Loader
from ..data.spec import CaptionSpec, ImageSpec, SampleSpec
from ..diffusion.augmentation import AugmentationConfig, area_downsample
from ..diffusion.diffusion_config import DiffusionConfig, training_process
from ..diffusion.resample import LOSS_AWARE, DenoisingConfig
from ..diffusion.sampling import PreviewConfig
from ..distributed.launch import DistributedConfig
from ..distributed.world import World
from ..images.signal import PixelSignal, Signal
from ..images.transforms import Window
from ..models.generator import GeneratorConfig
from ..tasks.alignment import AlignmentConfig
from ..tasks.denoising import DenoisingTask, UpsamplingTask
from ..tasks.perceptual import PerceptualConfig
from ..tasks.previews import Previews
from ..text.tokenizer import Tokenizer, TokenizerConfig
from ..tracking.trackers import TrackingConfig
from ..training.settings import OptimConfig, TrainingConfig, chosen_task
from .auxiliary import Auxiliaries, wrong_auxiliaries
from .recipe import Recipe, Session, without_logdir, wrong_annealing


@settings
class GeneratorRun:
    """Settings of ``train_generator.py``: of a base generator or, with ``small_size``, an upsampler."""

    kind: ClassVar[str] = "generator"
    has_auxiliaries: ClassVar[bool] = True  # losses beside that of the diffusion

    data: DataConfig = section(DataConfig)
    model: GeneratorConfig = section(GeneratorConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    diffusion: DiffusionConfig = section(DiffusionConfig)
    denoising: DenoisingConfig = section(DenoisingConfig)
    alignment: AlignmentConfig = section(AlignmentConfig)
    perceptual: PerceptualConfig = section(PerceptualConfig)
    augmentation: AugmentationConfig = section(AugmentationConfig)
    optim: OptimConfig = section(OptimConfig)
    training: TrainingConfig = section(TrainingConfig)
    preview: PreviewConfig = section(PreviewConfig)
    tracking: TrackingConfig = section(TrackingConfig)
    distributed: DistributedConfig = section(DistributedConfig)

    def faults(self) -> Iterator[Fault]:
        model, aspect, crop = self.model, self.data.aspect, self.augmentation.crop_size
        yield from wrong_annealing(self.training, self.optim)
        if not model.is_upsampler and self.augmentation != AugmentationConfig():
            names = f"{named('gaussian_blur')}, {named('noise_augmentation')} and {named('crop_size')}"
            remedy = f"set {named('small_size')}, or leave them out"
            yield Fault("", f"{names} are for upsamplers, but this is a base generator: {remedy}")
        if model.low_res.low_res_skip and self.diffusion.prediction != "x_start":
            found = f"but prediction is {self.diffusion.prediction}: set {named('prediction')} x_start"
            rule = f"adds the upsampled input to a prediction of x_start, {found}, or leave it out"
            yield Fault("model.low_res.low_res_skip", rule)
        if self.diffusion.is_flow and self.denoising.schedule_sampler == LOSS_AWARE:
            rule = f"{named('noise_schedule')} flow has no steps with losses: set it to uniform or logit_normal"
            yield Fault.of(self, "denoising.schedule_sampler", rule)
        if crop > self.image_size or crop % model.factor:
            most = f"at most {named('image_size')} ({self.image_size})"
            rule = f"must be {most} and a multiple of the upsampling factor ({model.factor})"
            yield Fault.of(self, "augmentation.crop_size", rule)
        if crop % model.unet.divisor:
            rule = f"must be a multiple of {model.unet.divisor}, the network's downsampling factor"
            yield Fault.of(self, "augmentation.crop_size", rule)
        multiple = math.lcm(model.unet.divisor, model.factor)
        if aspect.multi_aspect_ratio and aspect.bucket_factor % multiple:
            rule = f"must be a multiple of {multiple}, as the sizes of the network's images are"
            yield Fault.of(self, "data.aspect.bucket_factor", rule)
        yield from wrong_auxiliaries(self, crop or self.image_size, self.has_auxiliaries)
        until = model.unet.route_until < 1 and model.unet.route_share > 0 and self.kind == GeneratorRun.kind
        if until and not (self.training.iterations or self.training.samples):
            rule = f"is a share of {named('iterations')} or {named('samples')}, of which neither limits the run"
            yield Fault("model.unet.route_until", f"{rule}: set one of them")
        yield from faults_of(lambda: self.preview.check(self.diffusion, self.signal, self.is_conditional))

    @property
    def image_size(self) -> int:
        """Width and height of the training images in pixels."""
        return self.model.unet.image_size

    @property
    def has_text(self) -> bool:
        """Whether samples must have a caption."""
        return self.model.text.enc_attn_dim > 0

    @property
    def num_classes(self) -> int:
        """Number of classes, if samples must have one; else 0."""
        return self.model.unet.num_classes

    @property
    def is_conditional(self) -> bool:
        """Whether samples must have a caption or a class."""
        return self.has_text or self.num_classes > 0

    @property
    def signal(self) -> Signal:
        return PixelSignal(self.model.channels)

    def without_place(self, config: dict[str, Any]) -> dict[str, Any]:
        return without_logdir(config)

    def recipe(self, processes: int = 1) -> Recipe:
        return Recipe(
            self,
            GeneratorSettings.of_run(self),
            self.training,
            {"": self.optim},
            self.data,
            self.tracking,
            self.distributed,
            open_generator,
            self.has_text,
            self.preview.sample_interval,
            self.preview.preview_share,
        )


def open_generator(recipe: Recipe, world: World, tokenizer: Tokenizer | None) -> Session:
    run: GeneratorRun = recipe.settings
    tokenizer = tokenizer or recipe.tokenizer()
    auxiliaries, run = Auxiliaries.open(run, world)
    recipe = recipe.of(run)
    crop, size = run.augmentation.crop_size, (run.image_size, run.image_size)
    image = ImageSpec(size, run.model.channels, window=Window(crop, run.model.factor) if crop else None)
    captions = (CaptionSpec(tokenizer, run.model.text.text_length),) if tokenizer else ()
    spec = SampleSpec(image, captions, run.num_classes)

    def task(model: nn.Module, name: str, shown: Loader) -> DenoisingTask:
        found = _task(run, model)
        found.preview = previews_of(recipe, world, tokenizer, shown)
        if run.kind == GeneratorRun.kind:  # a LoRA adapts a network whose tokens take all blocks
            found.routes = run.model.unet.route_share > 0
            found.routed_until = run.training.position_at(run.model.unet.route_until, world.size)
        auxiliaries.join(found, session)
        return found

    session = Session(recipe, world, spec, task, tokenizer)
    return session


def _task(run: GeneratorRun, model: nn.Module) -> DenoisingTask:
    process = training_process(run.diffusion)
    if run.model.is_upsampler:
        factor, degradation = run.model.factor, run.augmentation.degradation
        upsampling = chosen_task(run.training.task, UpsamplingTask)
        task: DenoisingTask = upsampling(model, process, run.denoising, factor, degradation, run.num_classes)
    else:
        denoising = chosen_task(run.training.task, DenoisingTask)
        task = denoising(model, process, run.denoising, run.num_classes)
    task.inpaints = run.model.inpaint
    return task


def previews_of(recipe: Recipe, world: World, tokenizer: Tokenizer | None, data: Loader) -> Previews | None:
    """Previews of the first conditions of ``data``, as many as ``affordable``; None at sample_interval 0."""
    run: GeneratorRun = recipe.settings
    if not recipe.sample_interval:
        return None
    sampler, guidance = run.preview.sampler, run.preview.guidance
    passes = sampler.evaluations * guidance.passes(run.is_conditional)
    asked = sampler.process(run.diffusion).num_timesteps
    count, steps = recipe.affordable(world, run.preview.preview_samples, asked, passes)
    sampler = sampler if steps == asked else sampler.in_steps(steps)
    batch = data.first(count)
    cond, images = batch.cond.to("cpu"), batch.images.cpu()
    if tokenizer:
        captions = [tokenizer.decode(row) for row in cond.caption[0].tolist()]
    else:
        captions = [""] * count if cond.labels is None else [str(label) for label in cond.labels.tolist()]
    inputs = originals = None
    if run.model.is_upsampler:
        low_res, zero = area_downsample(images, run.model.factor), torch.zeros(count)
        cond = replace(cond, low_res=low_res, low_res_level=zero, low_res_blur=zero)
        upsampled = low_res.repeat_interleave(run.model.factor, 2).repeat_interleave(run.model.factor, 3)
        inputs, originals = run.signal.to_pixels(upsampled), run.signal.to_pixels(images)
    size = images.shape[2], images.shape[3]
    shown = sampler, guidance, run.diffusion, run.signal, cond, captions, size, recipe.microbatch
    return Previews(*shown, run.num_classes, inputs, originals)
