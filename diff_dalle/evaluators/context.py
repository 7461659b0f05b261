"""What evaluators share: models, captions, real images, and samples, each of which is made once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..batch import Conditioning
from ..config import Fault, InputError, given, named
from ..data.index import count_kinds, index_shards
from ..data.loader import DataConfig, Loader
from ..data.shards import ShardFiles
from ..data.sources import find_shards
from ..data.spec import CaptionSpec, ImageSpec, SampleSpec
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..distributed.world import World
from ..embeddings.contract import Clip
from ..images.signal import from_uint8, to_uint8
from ..randomness import random_uniform
from ..sampling.classifier import Classifier, Guide, load_guide
from ..sampling.clips import DecoderClip
from ..sampling.control import Control, Steering
from ..sampling.lora import of_guides
from ..sampling.pipeline import Pipeline, load
from ..sampling.request import ImageEdit, Request, in_turn
from ..sampling.stage_settings import StageSettings, settings_of_stages
from ..text.tokenizer import Tokenizer
from ..worlds.shapes.prompts import TASKS, ShapePrompt, shape_prompts
from ..worlds.shapes.render import render
from ..worlds.shapes.scenes import ShapesConfig
from ..worlds.shapes.shards import read_shapes_config
from .settings import EvaluateInputs

AT_ONCE = 1024  # training pictures that are compared at once


@dataclass(frozen=True)
class CaptionedImages:
    """images: uint8 [N, H, W, 3]; captions: N texts; cond: their tokens and mask [N, L], None without a tokenizer, and
    their classes, None where the shards have none or no generator takes them."""

    images: np.ndarray
    captions: list[str]
    cond: Conditioning


@dataclass(frozen=True)
class GuidanceSetting:
    """guidance_scale: classifier-free guidance, 1 = off. classifier_scale: noised-CLIP guidance, 0 = off.
    text_conditional: whether the generator is conditioned on the caption, or only the classifier reads it."""

    guidance_scale: float
    classifier_scale: float
    text_conditional: bool = True

    @property
    def name(self) -> str:
        parts = [] if self.text_conditional else ["text-unconditional"]
        parts += [f"classifier-free {self.guidance_scale:g}"] if self.guidance_scale != 1 else []
        parts += [f"noised CLIP {self.classifier_scale:g}"] if self.classifier_scale != 0 else []
        return " + ".join(parts) or "none"


class Context:
    """Models, data and samples of an evaluation. Its methods are collective: all ranks call them, in the same order."""

    def __init__(self, run: EvaluateInputs, world: World):
        self.run, self.settings, self.world = run, run.evaluation, world
        paths, base = run.upsampler_paths, self.settings.decoder_path or self.settings.model_path
        self.pipeline: Pipeline = self._load(base, paths)
        if base:
            self._check_kind()
        if self.settings.labels and not self._classes(self.pipeline):
            raise InputError("--labels is given, but no generator is class-conditional: leave it out")
        self._classifier = run.classifier.load(
            world.device,
            self.settings.precision,
            lora=self.settings.lora,
            accept_changed_base=self.settings.accept_changed_base,
        )
        self._samples: dict[tuple[tuple[str, ...], GuidanceSetting], list[np.ndarray]] = {}
        self._features: dict[tuple[tuple[str, ...], GuidanceSetting], Tensor] = {}

    def _check_kind(self) -> None:
        """InputError for a decoder in the place of a generator, and the reverse."""
        saved, is_decoder = self.pipeline.stages[0].saved, bool(self.settings.decoder_path)
        if (saved.settings.name == "decoder") != is_decoder:
            place, right = ("decoder_path", "model_path") if is_decoder else ("model_path", "decoder_path")
            rule = f"is {saved.path}, which holds a {saved.settings.name}: give it with {named(right)}"
            raise InputError(Fault(place, rule))

    # ---------------------------------------------------------------------------------------------------------- models

    def _load(self, base: str | Sequence[str], upsampler_paths: Sequence[str] = ()) -> Pipeline:
        """``base`` with the upsamplers, or with the rest of the latent cascade."""
        device, precision, cascade = str(self.world.device), self.settings.precision, self.run.cascade
        rest: dict[str, Any] = {"stage_b": cascade.stage_b, "stage_a": cascade.stage_a, "semantic": cascade.semantic}
        adapters = self._adapters if base else {}
        return load(base, device, precision=precision, upsampler_paths=upsampler_paths, **rest, **adapters)

    @property
    def _adapters(self) -> dict[str, Any]:
        """What ``load`` adapts every network by whose samples are compared."""
        return {"lora": of_guides(self.settings.lora)[1], "accept_changed_base": self.settings.accept_changed_base}

    @property
    def classifier(self) -> Classifier:
        return _noised_clip(self._classifier)  # evaluators that use it declare the need of one

    @cached_property
    def judge(self) -> Classifier:
        """What finds names in pictures: that of judge_path, or the classifier."""
        path = self.settings.judge_path
        return _noised_clip(load_guide(path, self.world.device, self.settings.precision)) if path else self.classifier

    @property
    def base(self) -> Pipeline:
        return Pipeline(self.pipeline.stages[:1])

    @property
    def upsamplers(self) -> Pipeline:
        """The pipeline without its base."""
        return Pipeline([stage for stage in self.pipeline.stages if stage.is_upsampler])

    @cached_property
    def _guidance(self) -> GuidanceConfig:
        """Of the base: as its checkpoint says, but for what the run gives."""
        return replace(self.base.stages[0].defaults.guidance, **given(self.run.guidance))

    @property
    def guidance_scale(self) -> float:
        """The scale of classifier-free guidance of the base, at the noise end; 1 = off. None given = as its checkpoint
        says."""
        return self._guidance.scales(self.base.tokenizer is not None or self._classes(self.base) > 0)[0]

    @property
    def default_guidance(self) -> GuidanceSetting:
        """Classifier-free guidance alone."""
        return GuidanceSetting(self.guidance_scale, 0.0)

    @cached_property
    def clip(self) -> Clip:
        """The decoder's CLIP, of the run's clip_path or where it was in training."""
        return DecoderClip(self.pipeline.stages, path=self.settings.clip_path).load()

    # --------------------------------------------------------------------------------------------------------- samples

    def embed(self, images: np.ndarray) -> Tensor:
        """Embeddings [N, E] of images, uint8 [N, H, W, 3], by the decoder's CLIP."""
        size = self.settings.batch_size
        batches = (from_uint8(images[i : i + size]) for i in range(0, len(images), size))
        return torch.cat([self.clip.encode_images(batch).cpu() for batch in batches])

    def vary(self, embeddings: Tensor) -> list[np.ndarray]:
        """Samples of every U-Net of the decoder from embeddings [N, E], as its checkpoint says: uint8 [N, H, W, 3]."""
        settings = self._recorded(self.pipeline)
        return self._sampled(self.pipeline, settings, [""] * len(embeddings), embeddings=embeddings.numpy())

    def sample_cascade(self, prompts: Sequence[str], size: tuple[int, int]) -> np.ndarray:
        """Samples of a latent cascade, as its checkpoints and its own settings say: uint8 [N, height, width, 3]."""
        return self._sampled(self.pipeline, self._cascade(self.pipeline), prompts, size=size)[-1]

    def reconstruct(self, images: np.ndarray) -> np.ndarray:
        """What stages B and A of a latent cascade make of images, uint8 [N, H, W, 3], by their semantic latents."""
        pipeline, given = self._load(""), {"size": images.shape[1:3], "reconstruct": list(images)}
        return self._sampled(pipeline, self._cascade(pipeline), [""] * len(images), **given)[-1]  # B and A alone

    def _recorded(self, pipeline: Pipeline) -> list[StageSettings]:
        """How the checkpoints say to sample, with the run's guidance scale for the first stage if it is a base."""
        settings = [replace(stage.defaults, batch_size=self.settings.batch_size) for stage in pipeline.stages]
        scale = self.run.guidance.guidance_scale
        if pipeline.has_base and scale is not None:
            settings[0] = replace(settings[0], guidance=replace(settings[0].guidance, guidance_scale=scale))
        return settings

    def _cascade(self, pipeline: Pipeline) -> list[StageSettings]:
        """``_recorded`` with the run's own settings of a latent cascade."""
        return settings_of_stages(pipeline.stages, self.run.cascade, defaults=self._recorded(pipeline))

    def sample(self, prompts: Sequence[str], guidance: GuidanceSetting, all_stages: bool = False) -> list[np.ndarray]:
        """Samples of the base, or of every stage: uint8 [N, H, W, 3] each. Equal requests are sampled once."""
        key, count = (tuple(prompts), guidance), len(self.pipeline.stages) if all_stages else 1
        if len(self._samples.get(key, ())) < count:
            self._samples[key] = self._sample(self.pipeline if all_stages else self.base, prompts, guidance)
        return self._samples[key][:count]

    def features(self, prompts: Sequence[str], guidance: GuidanceSetting) -> Tensor:
        """The classifier's features [N, D] of the base's samples."""
        key = (tuple(prompts), guidance)
        if key not in self._features:
            self._features[key] = self.classifier.encode_image(self.sample(prompts, guidance)[0])
        return self._features[key]

    def edit(
        self, prompts: Sequence[str], edit: ImageEdit, guidance: GuidanceSetting, sampler: SamplerConfig | None = None
    ) -> np.ndarray:
        """Edited images of the last stage: uint8 [N, H, W, 3]. sampler: of the base, instead of the run's."""
        return self._sample(self.pipeline, prompts, guidance, sampler, edit=edit)[-1]

    @cached_property
    def _steered(self) -> Pipeline:
        """The base, with its LoRAs, and with the ControlNet."""
        path, device, precision = self.settings.model_path, str(self.world.device), self.settings.precision
        return load(path, device, precision=precision, controlnet=self.settings.controlnet, **self._adapters)

    @property
    def steering(self) -> Steering:
        steering = self._steered.stages[0].steering
        assert steering is not None  # evaluators that use it declare the need
        return steering

    def steer(self, prompts: Sequence[str], control: Control | None) -> np.ndarray:
        """Samples of the base, controlled by pictures, or not: uint8 [N, H, W, 3]."""
        if control is None:
            return self.sample(prompts, self.default_guidance)[0]
        return self._sample(self._steered, prompts, self.default_guidance, control=control)[-1]

    def upsample(self, prompts: Sequence[str], low_res: np.ndarray) -> np.ndarray:
        """Images upsampled without a base: uint8 [N, H, W, 3]. prompts: ignored by upsamplers without text."""
        pipeline = self.upsamplers
        if all(stage.tokenizer is None for stage in pipeline.stages):
            prompts = [""] * len(low_res)
        settings = settings_of_stages(pipeline.stages, self.run.upsamplers)
        return self._sampled(pipeline, settings, prompts, low_res=low_res)[-1]

    def _sample(
        self,
        pipeline: Pipeline,
        prompts: Sequence[str],
        guidance: GuidanceSetting,
        sampler: SamplerConfig | None = None,
        **given: Any,
    ) -> list[np.ndarray]:
        """given: more of the ``Request``."""
        usual, scale = self._guidance, guidance.guidance_scale
        base = StageSettings(
            sampler=sampler or self.run.sampler,
            guidance=usual.at_scale(1.0) if scale == 1 else replace(usual, guidance_scale=scale),
            classifier=self._classifier,
            classifier_scale=guidance.classifier_scale,
            classifier_gradient=self.run.classifier.classifier_gradient,
            classifier_form=self.run.classifier.classifier_form,
            batch_size=self.settings.batch_size,
        )
        upsampling = settings_of_stages(self.pipeline.stages[1:], self.run.upsamplers)[: len(pipeline.stages) - 1]
        # A generator without text is shown to those who have a classifier that reads it, as what this guides.
        unread = self._classifier is not None and not any(stage.reads_text for stage in pipeline.stages)
        captions = prompts if guidance.text_conditional and not unread else [""] * len(prompts)
        return self._sampled(pipeline, [base, *upsampling], captions, classifier_prompts=prompts, **given)

    def _sampled(
        self, pipeline: Pipeline, settings: Sequence[StageSettings], prompts: Sequence[str], **given: Any
    ) -> list[np.ndarray]:
        """Of every stage. given: more of the ``Request``."""
        count = len(prompts)
        request = Request(prompts, self._seeds(count), self._labels(pipeline, count), **given)
        return pipeline.sample_stages(request, settings, world=self.world)

    @staticmethod
    def _classes(pipeline: Pipeline) -> int:
        """The number of classes that the generators take; 0 = none takes any."""
        return max(stage.num_classes for stage in pipeline.stages)

    def _labels(self, pipeline: Pipeline, count: int) -> list[int] | None:
        """A class for each image, where a generator takes them; see ``EvaluateConfig.labels``."""
        classes = self._classes(pipeline)
        if not classes:
            return None
        if self.settings.labels:
            return in_turn(self.settings.labels, count)
        of_data = self.captioned.cond.labels if self._data_classes else None
        if of_data is not None and len(of_data) == count:
            return of_data.tolist()
        return (random_uniform(0, "class to evaluate", self._seeds(count)) * classes).astype(int).tolist()

    def _seeds(self, count: int) -> range:
        return range(self.settings.seed, self.settings.seed + count)

    # ------------------------------------------------------------------------------------------------------------ data

    @cached_property
    def shapes(self) -> ShapesConfig:
        return read_shapes_config(self.settings.shapes_dir)

    def shape_prompts(self, tasks: Sequence[str] | None = None, count: int = 0) -> list[ShapePrompt]:
        """Prompts of these ShapeEval tasks, by default of all; count per task, 0 = prompts_per_task."""
        count = count or self.settings.prompts_per_task
        return shape_prompts(count, self.settings.seed, self.shapes, tuple(TASKS) if tasks is None else tasks)

    @cached_property
    def captioned(self) -> CaptionedImages:
        """The first images of data_dir at the base's resolution, with captions as the classifier reads them, or the
        base, if there is none."""
        if self._classifier is None:
            return self._read_shards(self.base)
        return self._read_shards(self.base, self.classifier.tokenizer, self.classifier.config.text_length)

    @cached_property
    def real_features(self) -> Tensor:
        """The classifier's features [N, D] of the images of ``captioned``."""
        return self.classifier.encode_image(self.captioned.images)

    @cached_property
    def text_features(self) -> Tensor:
        """The classifier's features [N, D] of the captions of ``captioned``."""
        return self.classifier.encode_text(self.captioned.captions)

    def real_images(self) -> tuple[np.ndarray, list[str]]:
        """Held-out images as the last stage would generate them, uint8 [N, H, W, 3], and their captions."""
        stage = self.pipeline.stages[-1]
        if self.settings.shapes_dir:
            prompts = self.shape_prompts(("held-out pairs",))
            images, captions = renders_of(prompts, self.pipeline.image_size), [prompt.text for prompt in prompts]
        else:
            data = self._read_shards(self.pipeline)
            images, captions = data.images, data.captions
        return stage.signal.to_pixels(stage.signal.from_pixels(images)), captions  # gray for a grayscale generator

    @cached_property
    def _data_classes(self) -> int:
        """The number of classes of the images in data_dir; 0 = they have none, or no generator takes any."""
        classes, captioned = self._classes(self.pipeline), self.settings.captioned
        if not classes or not captioned or self.settings.labels:
            return 0
        return classes if "cls" in count_kinds(index_shards(find_shards(captioned), ShardFiles())) else 0

    def training_pictures(self) -> Iterator[np.ndarray]:
        """This rank's batches of the pictures of training_dir, as the base would generate them: uint8 [N, H, W, 3]."""
        spec = SampleSpec(ImageSpec((self.base.image_size, self.base.image_size)))
        data = Loader(DataConfig(data_dir=self.settings.training_dir), spec, shuffle=False)
        starts = range(self.world.rank * AT_ONCE, data.samples, self.world.size * AT_ONCE)
        for start in tqdm(starts, "training pictures", unit="batch", disable=None if self.world.is_main else True):
            batch = data.batch_at(range(start, min(start + AT_ONCE, data.samples)))
            yield self.as_generated(to_uint8(batch.images).numpy())

    def as_generated(self, images: np.ndarray) -> np.ndarray:
        """Images as the base would generate them, gray for a grayscale generator: uint8 [N, H, W, 3]."""
        signal = self.base.stages[0].signal
        return signal.to_pixels(signal.from_pixels(images))

    def _read_shards(
        self, pipeline: Pipeline, tokenizer: Tokenizer | None = None, text_length: int = 0
    ) -> CaptionedImages:
        """At a pipeline's resolution, with captions as its last stage reads them, unless told otherwise."""
        stage, image_size = pipeline.stages[-1], pipeline.image_size
        if tokenizer is None and stage.tokenizer is not None:
            tokenizer, text_length = stage.tokenizer, stage.config.text.text_length
        config = DataConfig(data_dir=self.settings.captioned, caption_field=self.settings.caption_field)
        captions = () if tokenizer is None else (CaptionSpec(tokenizer, text_length),)
        spec = SampleSpec(ImageSpec((image_size, image_size)), captions, self._data_classes)
        data = Loader(config, spec, shuffle=False)
        batch = data.batch_at(range(min(self.settings.num_samples, data.samples)))
        texts = [""] * len(batch)
        if tokenizer is not None and batch.cond.tokens is not None:
            texts = [tokenizer.decode(row) for row in batch.cond.tokens.tolist()]
        return CaptionedImages(to_uint8(batch.images).numpy(), texts, batch.cond)


def renders_of(prompts: Sequence[ShapePrompt], size: int | tuple[int, int]) -> np.ndarray:
    """Real images of ShapeEval prompts: uint8 [N, height, width, 3]."""
    return np.stack([render(prompt.scene, size) for prompt in prompts])


def _noised_clip(guide: Guide | None) -> Classifier:
    """InputError for what is none."""
    if not isinstance(guide, Classifier):
        raise InputError("the classifier tells classes apart, but only a noised CLIP can score captions: give one")
    return guide
