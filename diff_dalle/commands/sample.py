"""Settings of ``sample.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config import Fault, expectations, named, option, section, settings
from ..config.bounds import MAX_BATCH, MAX_SEED, MAX_SIDE, MAX_TEXTS
from ..data.captions import caption_option
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.editing import EditConfig
from ..diffusion.sampling import SamplerConfig
from ..distributed.launch import DistributedConfig
from ..embeddings.clip import CLIPS
from ..models.generator import GeneratorConfig
from ..models.noised_clip import NoisedClipConfig
from ..models.options import PRECISIONS
from ..sampling.classifier import ClassifierConfig, Guide
from ..sampling.control import SteeringConfig
from ..sampling.lora_config import accept_option, check_accepted, lora_option
from ..sampling.pipeline import Pipeline
from ..sampling.stage_settings import (
    BASE,
    UPSAMPLERS,
    GivenGuidance,
    GivenSampler,
    LatentCascadeConfig,
    StageSettings,
    UpsamplersConfig,
    check_kinds,
    settings_of_stages,
)

_ExpectedModel = expectations(GeneratorConfig, "Checks of the checkpoint's network")
ExpectedDiffusion = expectations(DiffusionConfig, "Checks of the checkpoint's diffusion process")
_ExpectedClassifier = expectations(
    NoisedClipConfig, "Checks of the classifier's network", leave_out=("image_size", "text_length", "dropout_text")
)


# valid-type, misc: mypy cannot know classes made by ``expectations``.
@settings
class ExpectedModel(_ExpectedModel):  # type: ignore[valid-type, misc]
    """Checks of the checkpoint's network"""

    class_cond: bool | None = option(
        None, "must match the checkpoint if given; whether the generator is class-conditional", free=True
    )
    use_new_attention_order: bool | None = option(
        None,
        "must match a file by Guided-Diffusion if given; whether projection rows are ordered by "
        "query, key and value before heads",
        free=True,
    )


@settings
class ExpectedClassifier(_ExpectedClassifier):  # type: ignore[valid-type, misc]
    """Checks of the classifier's network"""

    classifier_pool: str | None = option(
        None, "must match the checkpoint if given; pooling of the last feature map", free=True
    )


@settings
class PromptConfig:
    """Images to sample"""

    model_path: tuple[str, ...] = option(
        (),
        "checkpoint of a generator, decoder or stage C: ema_….pt or model….pt, local or remote; several for a decoder "
        "with a file for each U-Net",
    )
    lora: tuple[str, ...] = lora_option()
    accept_changed_base: bool = accept_option()
    prompts: str = option(
        "",
        "prompts, separated by |; for a decoder without text and images, their embeddings replace those of images",
    )
    prompts_file: str = option("", "text file with one prompt per line")
    data_dir: tuple[str, ...] = option(
        (),
        "text files with one prompt per line, folders of text files, or shards whose captions are the prompts (see "
        "caption_field)",
    )
    caption_field: str = caption_option()
    low_res_dir: str = option(
        "",
        "folder of low-resolution images, all of one size, for upsamplers without a base generator; prompts are "
        "matched to file names in sorted order",
    )
    base_samples: str = option(
        "",
        ".npz file of low-resolution images (arr_0) and classes (arr_1), as sampling writes it, for an upsampler, "
        "which model_path may then be; used in turn",
    )
    init_image: tuple[str, ...] = option(
        (), "images to edit, used in turn: image to image (strength), variations (variation), or inpainting (mask)"
    )
    mask: tuple[str, ...] = option(
        (),
        "masks of init_image, of the same sizes, used in turn: white = inpainted, black = unchanged; on a "
        "transparent layer, the drawing is inpainted; in a picture with transparent holes, the holes; in labels, 1",
    )
    whole_mask: bool = option(False, "accept a mask or control_mask that inpaints everything or nothing")
    embeddings: str = option(
        "", ".npy file of image embeddings for a decoder, [N, width], used in turn: one image for each"
    )
    images: tuple[str, ...] = option(
        (),
        "images to vary by a decoder or stage C, from their CLIP embeddings: files and folders, used in turn",
    )
    reconstruct: tuple[str, ...] = option(
        (),
        "pictures to reconstruct from semantic latents by stages B and A of a latent cascade: files and folders, "
        "used in turn",
        needs=("stage_b",),
    )
    image_weights: tuple[float, ...] = option(
        (),
        "weights to mix the images' embeddings into one, scaled to unit norm; below 0 = away from an image",
    )
    interpolate: int = option(
        0,
        "number of interpolation steps between the embeddings of two images, both included, with the same noise; 0 = "
        "off",
        most=MAX_BATCH,
    )
    clip_path: str = option(
        "",
        "CLIP that the decoder or latent cascade was trained with, for images and prompts, if not where the "
        "checkpoint says; as in prepare_data.py embeddings",
    )
    clip_make: str | None = option(
        None, "its maker; none = as the checkpoint says, else diff_dalle", choices=CLIPS, needs=("clip_path",)
    )
    labels: tuple[int, ...] = option((), "classes for a class-conditional generator, used in turn", longest=MAX_TEXTS)
    negative_prompt: str = option("", "negative prompt of classifier-free guidance; empty = no caption")
    num_samples: int = option(
        0, "number of images, with prompts and images used in turn; 0 = one for each", least=0, most=MAX_BATCH
    )
    seed: int = option(0, "random seed: image i depends on seed + i alone", most=MAX_SEED)
    batch_size: int = option(StageSettings.batch_size, "images per batch and process", least=1, most=MAX_BATCH)
    sample_size: tuple[int, ...] = option(
        (), "HEIGHT,WIDTH of the images in pixels, after all upsamplers; none = as trained", most=MAX_SIDE
    )
    precision: str = option("auto", "floating-point precision of the network", choices=PRECISIONS)
    bpe_path: str = option("", "tokenizer merge file, for checkpoints of earlier versions that lack theirs")
    logdir: str = option("", "output folder; empty = $OPENAI_LOGDIR, else a new one in ./samples")

    def faults(self) -> Iterator[Fault]:
        model, low_res, images = map(named, ("model_path", "low_res_dir", "images"))
        if not (self.model_path or self.low_res_dir or self.base_samples or self.reconstruct):
            others = f"{low_res} and {named('upsampler_paths')}, to upsample existing images"
            yield Fault("model_path", f"is required: an ema_….pt or model….pt file written in training (or {others})")
        if self.reconstruct and (self.model_path or self.low_res_dir):
            rule = f"names the pictures that stages B and A make again: leave {model} and {low_res} out"
            yield Fault("reconstruct", rule)
        if self.model_path and self.low_res_dir:
            rule = f"holds images to upsample instead of those of a base generator: leave {model} or it out"
            yield Fault("low_res_dir", rule)
        if self.base_samples and self.low_res_dir:
            yield Fault("base_samples", f"and {low_res} exclude each other: leave one of them out")
        if self.images and self.embeddings:
            yield Fault("images", f"and {named('embeddings')} exclude each other: leave one of them out")
        if (self.image_weights or self.interpolate) and not self.images:
            setting = "image_weights" if self.image_weights else "interpolate"
            yield Fault(setting, f"is set, but there are no images: give them with {images}")
        if self.interpolate and self.num_samples % self.interpolate:
            rule = f"must be a multiple of {named('interpolate')} ({self.interpolate}): whole strips"
            yield Fault.of(self, "num_samples", rule)
        sources = [name for name in ("prompts", "prompts_file", "data_dir") if getattr(self, name)]
        if self.clip_path and not (self.images or sources):
            rule = f"is set, but there is nothing to encode: give {images} or {named('prompts')}, or leave it out"
            yield Fault("clip_path", rule)
        if self.mask and not self.init_image:
            yield Fault("mask", f"is set, but there is no image to inpaint: give it with {named('init_image')}")
        if len(sources) > 1:
            first, *rest = sources
            yield Fault(first, f"and {' and '.join(map(named, rest))} exclude each other: give one of them")
        if self.sample_size and (len(self.sample_size) != 2 or min(self.sample_size) < 1):
            yield Fault.of(self, "sample_size", "must be HEIGHT,WIDTH")


@settings
class SampleRun:
    """All settings of ``sample.py``."""

    what: PromptConfig = section(PromptConfig)
    # valid-type: mypy cannot know classes made by ``expectations``.
    sampler: GivenSampler = section(GivenSampler)
    guidance: GivenGuidance = section(GivenGuidance)
    upsamplers: UpsamplersConfig = section(UpsamplersConfig)
    cascade: LatentCascadeConfig = section(LatentCascadeConfig)
    edit: EditConfig = section(EditConfig)
    steering: SteeringConfig = section(SteeringConfig)
    classifier: ClassifierConfig = section(ClassifierConfig)
    model: ExpectedModel = section(ExpectedModel)
    diffusion: ExpectedDiffusion = section(ExpectedDiffusion)  # type: ignore[valid-type]
    classifier_model: ExpectedClassifier = section(ExpectedClassifier)
    distributed: DistributedConfig = section(DistributedConfig)

    def faults(self) -> Iterator[Fault]:
        if self.edit != EditConfig() and not self.what.init_image:
            names = "strength, variation, inpaint_resamples or inpaint_jump"
            yield Fault("", f"{names} is set, but there is no image to edit: give it with {named('init_image')}")
        if self.what.whole_mask and not (self.what.mask or self.steering.control_mask):
            yield Fault("whole_mask", f"is set, but there is no mask: give it with {named('mask')}")
        if self.classifier_model != ExpectedClassifier() and not self.classifier.classifier_path:
            missing = f"but no classifier: give it with {named('classifier_path')}"
            yield Fault("", f"settings of a classifier's network are given, {missing}")
        if self.what.reconstruct and not self.cascade.semantic:
            missing = f"but there is no semantic encoder for them: give its checkpoint with {named('semantic')}"
            yield Fault("what.reconstruct", f"names pictures, {missing}")
        if self.cascade.stage_b and self.upsamplers != UpsamplersConfig():
            own = "set its own (their flags begin with --stage_b_)"
            yield Fault("", f"upsampler settings are given, but stage B is no upsampler: {own}")
        if self.what.base_samples and bool(self.what.model_path) == bool(self.upsamplers.upsampler_paths):
            rule = f"needs either {named('model_path')} or {named('upsampler_paths')} to name the upsampler"
            yield Fault("what.base_samples", rule)
        if self.what.low_res_dir and not self.upsamplers.upsampler_paths:
            missing = f"but there is no upsampler: give it with {named('upsampler_paths')}"
            yield Fault("what.low_res_dir", f"holds images to upsample, {missing}")
        yield from BASE.faults(self.sampler)
        check_accepted(self.what.accept_changed_base, self.what.lora, self.steering.controlnet)

    @property
    def checkpoints(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those of the base generator or its parts, and of the upsamplers."""
        if self.what.base_samples:
            return (), self.what.model_path or self.upsamplers.upsampler_paths
        return self.what.model_path, self.upsamplers.upsampler_paths

    def settings(self, pipeline: Pipeline, classifier_scale: float, guide: Guide | None = None) -> list[StageSettings]:
        """The settings of all stages: what is given, and else what their checkpoints say. guide: the loaded classifier,
        which its stage takes if it has a precision of its own."""
        given = self.sampler, self.guidance, self.cascade, self.upsamplers
        guided = [self.classifier] if self.classifier.classifier_path else []
        base: dict[str, Any] = {"classifier_scale": classifier_scale, "batch_size": self.what.batch_size}
        if guide is not None and self.classifier.classifier_precision:
            base["classifier"] = guide
        if self.what.base_samples and self.what.model_path:  # the upsampler takes the flags of a base generator
            found = {name: value for config in (*given, *guided) for name, value in BASE.given(config).items()}
            found |= {**UPSAMPLERS.given(self.upsamplers), **base}
            return [BASE.changed(stage.defaults, found) for stage in pipeline.stages]
        check_kinds([stage.flags for stage in pipeline.stages], *given, *guided)
        first = pipeline.stages[0]
        unsaid = self.sampler == GivenSampler() and first.defaults.sampler == SamplerConfig()
        if guided and unsaid and not (isinstance(first.diffusion, DiffusionConfig) and first.diffusion.is_flow):
            base["timestep_respacing"] = ""  # as Guided-Diffusion does with a classifier
        return settings_of_stages(pipeline.stages, *given, *guided, **base)
