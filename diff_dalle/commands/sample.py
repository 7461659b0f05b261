"""Settings of ``sample.py``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import expectations, given, option, section
from ..data.captions import caption_option
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.editing import EditConfig
from ..distributed.launch import DistributedConfig
from ..embeddings.clip import CLIPS
from ..errors import InputError
from ..models.generator import GeneratorConfig
from ..models.noised_clip import NoisedClipConfig
from ..models.precision_names import PRECISIONS
from ..sampling.classifier import ClassifierConfig
from ..sampling.control import SteeringConfig
from ..sampling.latent_config import LatentCascadeConfig
from ..sampling.lora_config import accept_option, check_accepted, lora_option
from ..sampling.pipeline import Pipeline
from ..sampling.request import StageSettings, UpsamplersConfig
from .recorded import GivenGuidance, GivenSampler

ExpectedModel = expectations(GeneratorConfig, "Checks of the checkpoint's network")
ExpectedDiffusion = expectations(DiffusionConfig, "Checks of the checkpoint's diffusion process")
ExpectedClassifier = expectations(
    NoisedClipConfig, "Checks of the classifier's network", leave_out=("image_size", "text_length", "dropout_text")
)


@dataclass(frozen=True)
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
        "prompts, separated by |; for a decoder without text and without images, their embeddings stand in for those",
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
    init_image: tuple[str, ...] = option(
        (), "images to edit, used in turn: image to image (strength), variations (variation), or inpainting (mask)"
    )
    mask: tuple[str, ...] = option(
        (), "masks of init_image, of the same sizes, used in turn: white = inpainted, black = unchanged"
    )
    embeddings: str = option(
        "", ".npy file of image embeddings for a decoder, [N, width], used in turn: one image for each"
    )
    images: tuple[str, ...] = option(
        (),
        "images whose variations a decoder or stage C makes, by the embeddings of its CLIP: files and folders, used in "
        "turn",
    )
    reconstruct: tuple[str, ...] = option(
        (),
        "pictures that stages B and A of a latent cascade make again from their semantic latents: files and folders, "
        "used in turn",
        needs=("stage_b",),
    )
    image_weights: tuple[float, ...] = option(
        (),
        "mix the images into one embedding: the sum of theirs with these weights, scaled to unit norm; below 0 = away "
        "from an image",
    )
    interpolate: int = option(
        0,
        "number of steps from the embedding of the first of two images to that of the second, both included, with the "
        "same noise; 0 = off",
    )
    clip_path: str = option(
        "",
        "CLIP of a decoder's or latent cascade's training, for images and prompts, if it is not where the checkpoint "
        "says; spelled as in prepare_data.py embeddings",
    )
    clip_make: str | None = option(
        None, "its maker; none = as the checkpoint says, else diff_dalle", choices=tuple(CLIPS), needs=("clip_path",)
    )
    labels: tuple[int, ...] = option((), "classes for a class-conditional generator, used in turn")
    negative_prompt: str = option("", "negative prompt of classifier-free guidance; empty = no caption")
    num_samples: int = option(0, "number of images, with prompts and images used in turn; 0 = one for each")
    seed: int = option(0, "random seed: image i depends on seed + i alone")
    batch_size: int = option(StageSettings.batch_size, "images per batch and process")
    sample_size: tuple[int, ...] = option(
        (), "HEIGHT,WIDTH of the images in pixels, after all upsamplers; none = as trained"
    )
    precision: str = option("auto", "floating-point precision of the network", choices=PRECISIONS)
    bpe_path: str = option("", "tokenizer merge file, for checkpoints of earlier versions that do not hold theirs")
    logdir: str = option("", "output folder; empty = $OPENAI_LOGDIR, else a new temporary folder")

    def __post_init__(self):
        if not self.model_path and not self.low_res_dir and not self.reconstruct:
            raise InputError(
                "--model_path is required: an ema_….pt or model….pt file written in training (or --low_res_dir and "
                "--upsampler_paths, to upsample existing images)"
            )
        if self.reconstruct and (self.model_path or self.low_res_dir):
            raise InputError(
                "--reconstruct names the pictures that stages B and A make again: leave --model_path and --low_res_dir "
                "out"
            )
        if self.model_path and self.low_res_dir:
            raise InputError(
                "--low_res_dir holds images to upsample instead of those of a base generator: leave --model_path or "
                "--low_res_dir out"
            )
        if self.images and self.embeddings:
            raise InputError("--images and --embeddings exclude each other: leave one of them out")
        if (self.image_weights or self.interpolate) and not self.images:
            raise InputError("image_weights or interpolate is set, but there are no images: give them with --images")
        if self.interpolate and self.num_samples % self.interpolate:
            raise InputError(
                f"num_samples is {self.num_samples}, but must be a multiple of interpolate ({self.interpolate}): whole "
                "strips"
            )
        if self.clip_path and not (self.images or self.prompts or self.prompts_file or self.data_dir):
            raise InputError(
                "--clip_path is set, but there is nothing to encode: give --images or --prompts, or leave it out"
            )
        if self.mask and not self.init_image:
            raise InputError("--mask is set, but there is no image to inpaint: give it with --init_image")
        if len([source for source in (self.prompts, self.prompts_file, self.data_dir) if source]) > 1:
            raise InputError("--prompts, --prompts_file and --data_dir exclude each other: give one of them")
        if self.num_samples < 0 or self.batch_size < 1:
            raise InputError(
                f"num_samples is {self.num_samples} and batch_size {self.batch_size}, but they must be at least 0 and 1"
            )
        if self.sample_size and (len(self.sample_size) != 2 or min(self.sample_size) < 1):
            raise InputError(f"sample_size is {','.join(map(str, self.sample_size))}, but must be HEIGHT,WIDTH")


@dataclass(frozen=True)
class SampleRun:
    """All settings of ``sample.py``."""

    what: PromptConfig = section(PromptConfig)
    # valid-type: mypy cannot know classes made by ``overrides`` and ``expectations``.
    sampler: GivenSampler = section(GivenSampler)
    guidance: GivenGuidance = section(GivenGuidance)
    upsamplers: UpsamplersConfig = section(UpsamplersConfig)
    cascade: LatentCascadeConfig = section(LatentCascadeConfig)
    edit: EditConfig = section(EditConfig)
    steering: SteeringConfig = section(SteeringConfig)
    classifier: ClassifierConfig = section(ClassifierConfig)
    model: ExpectedModel = section(ExpectedModel)  # type: ignore[valid-type]
    diffusion: ExpectedDiffusion = section(ExpectedDiffusion)  # type: ignore[valid-type]
    classifier_model: ExpectedClassifier = section(ExpectedClassifier)  # type: ignore[valid-type]
    distributed: DistributedConfig = section(DistributedConfig)

    def __post_init__(self):
        if self.edit != EditConfig() and not self.what.init_image:
            raise InputError(
                "strength, variation, inpaint_resamples or inpaint_jump is set, but there is no image to edit: give it "
                "with --init_image"
            )
        if self.classifier_model != ExpectedClassifier() and not self.classifier.classifier_path:
            raise InputError(
                "settings of a classifier's network are given, but no classifier: give it with --classifier_path"
            )
        check_accepted(self.what.accept_changed_base, self.what.lora, self.steering.controlnet)
        if self.what.reconstruct and not self.cascade.semantic:
            raise InputError(
                "--reconstruct names pictures, but there is no semantic encoder for them: give its checkpoint with "
                "--semantic"
            )
        if self.cascade.stage_b and self.upsamplers != UpsamplersConfig():
            raise InputError(
                "upsampler settings are given, but stage B is no upsampler: set its own (their flags begin with "
                "--stage_b_)"
            )
        if self.what.low_res_dir and not self.upsamplers.upsampler_paths:
            raise InputError(
                "--low_res_dir holds images to upsample, but there is no upsampler: give it with --upsampler_paths"
            )

    def settings(self, pipeline: Pipeline, classifier_scale: float) -> list[StageSettings]:
        """The settings of all stages: what is given, and else what their checkpoints say."""
        base, defaults = None, pipeline.upsampler_defaults
        if self.cascade.stage_b:
            upsampling = [self.cascade.settings(default) for default in defaults]
        else:
            upsampling = self.upsamplers.settings(defaults)
        if pipeline.has_base:
            usual = pipeline.stages[0].defaults
            base = replace(
                usual,
                sampler=usual.sampler.changed(**given(self.sampler)),
                guidance=replace(usual.guidance, **given(self.guidance)),
                classifier=self.classifier.classifier_path or None,
                classifier_scale=classifier_scale,
                classifier_gradient=self.classifier.classifier_gradient,
                batch_size=self.what.batch_size,
                **self.cascade.stage_c,
            )
        elif (
            given(self.sampler) or given(self.guidance) or self.classifier != ClassifierConfig() or self.cascade.stage_c
        ):
            raise InputError(
                "settings of a base generator's sampler, guidance, shift, t_start, t_end or classifier are given, but "
                "there is none: set the upsamplers' own (their flags begin with --upsampler_) or stage B's (--stage_b_)"
            )
        return pipeline.stage_settings(base, upsampling)
