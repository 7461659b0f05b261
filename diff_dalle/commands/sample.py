"""Settings of ``sample.py``, and the request made from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import storage
from ..config import expectations, given, option, overrides, section
from ..data.caption_list import read_captions
from ..data.captions import caption_option
from ..data.npy import MAX_HEADER, parse_header
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.editing import EditConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..distributed.launch import DistributedConfig
from ..errors import InputError, quantity
from ..images.files import read_image, read_low_res, read_mask
from ..models.generator import GeneratorConfig
from ..models.noised_clip import NoisedClipConfig
from ..models.precision import PRECISIONS
from ..sampling.classifier import ClassifierConfig
from ..sampling.pipeline import Pipeline
from ..sampling.request import ImageEdit, Request, StageSettings, UpsamplersConfig

ExpectedModel = expectations(GeneratorConfig, "Checks of the checkpoint's network")
ExpectedDiffusion = expectations(DiffusionConfig, "Checks of the checkpoint's diffusion process")
ExpectedClassifier = expectations(
    NoisedClipConfig, "Checks of the classifier's network", leave_out=("image_size", "text_length", "dropout_text")
)


GivenSampler = overrides(
    SamplerConfig, "Sampler (none = as the checkpoint says; a generator: dpm++2m with 30 steps and eta 0)"
)
GivenGuidance = overrides(GuidanceConfig, "Guidance (none = as the checkpoint says; a generator: static thresholding)")


@dataclass(frozen=True)
class PromptConfig:
    """Images to sample"""

    model_path: str = option("", "checkpoint of a generator or decoder: ema_….pt or model….pt, local or remote")
    prompts: str = option("", "prompts, separated by |")
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
    labels: tuple[int, ...] = option((), "classes for a class-conditional generator, used in turn")
    negative_prompt: str = option("", "negative prompt of classifier-free guidance; empty = no caption")
    num_samples: int = option(0, "number of images, with the prompts used in turn; 0 = one per prompt")
    seed: int = option(0, "random seed: image i depends on seed + i alone")
    batch_size: int = option(StageSettings.batch_size, "images per batch and process")
    sample_size: tuple[int, ...] = option(
        (), "HEIGHT,WIDTH of the images in pixels, after all upsamplers; none = as trained"
    )
    precision: str = option("auto", "floating-point precision of the network", choices=PRECISIONS)
    bpe_path: str = option("", "tokenizer merge file, for checkpoints of earlier versions that do not hold theirs")
    logdir: str = option("", "output folder; empty = $OPENAI_LOGDIR, else a new temporary folder")

    def __post_init__(self):
        if not self.model_path and not self.low_res_dir:
            raise InputError(
                "--model_path is required: an ema_….pt or model….pt file written in training (or --low_res_dir and "
                "--upsampler_paths, to upsample existing images)"
            )
        if self.model_path and self.low_res_dir:
            raise InputError(
                "--low_res_dir holds images to upsample instead of those of a base generator: leave --model_path or "
                "--low_res_dir out"
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
    sampler: GivenSampler = section(GivenSampler)  # type: ignore[valid-type]
    guidance: GivenGuidance = section(GivenGuidance)  # type: ignore[valid-type]
    upsamplers: UpsamplersConfig = section(UpsamplersConfig)
    edit: EditConfig = section(EditConfig)
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
        if self.what.low_res_dir and not self.upsamplers.upsampler_paths:
            raise InputError(
                "--low_res_dir holds images to upsample, but there is no upsampler: give it with --upsampler_paths"
            )

    def settings(self, pipeline: Pipeline, classifier_scale: float) -> list[StageSettings]:
        """The settings of all stages: what is given, and else what their checkpoints say."""
        base, upsampling = None, self.upsamplers.settings(pipeline.upsampler_defaults)
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
            )
        elif given(self.sampler) or given(self.guidance) or self.classifier != ClassifierConfig():
            raise InputError(
                "settings of a base generator's sampler, guidance or classifier are given, but there is none: set the "
                "upsamplers' own (their flags begin with --upsampler_)"
            )
        return pipeline.stage_settings(base, upsampling)


def read_request(config: PromptConfig, edit: EditConfig) -> Request:
    """The request for exactly ``num_samples`` images, with prompts, labels and images read from their files. InputError
    for missing or unusable prompts or images."""
    prompts, low_res = _prompts(config), None
    embeddings = read_embeddings(config.embeddings) if config.embeddings else None
    found = (prompts, config.labels, config.init_image, () if embeddings is None else embeddings)
    count = config.num_samples or max(map(len, found))
    if config.low_res_dir:
        names, low_res = read_low_res(config.low_res_dir)
        if count > len(names) or config.num_samples:
            raise InputError(
                f"{config.low_res_dir} holds {quantity(len(names), 'image')}, which is the number of images sampled: "
                "give no more prompts, labels or init_image, and leave num_samples out"
            )
        count = len(names)
    return Request(
        [prompts[i % len(prompts)] for i in range(count)],
        [config.seed + i for i in range(count)],
        [config.labels[i % len(config.labels)] for i in range(count)] if config.labels else None,
        config.negative_prompt,
        size=(config.sample_size[0], config.sample_size[1]) if config.sample_size else None,
        low_res=low_res,
        edit=_read_edit(config, edit) if config.init_image else None,
        embeddings=None if embeddings is None else embeddings[[i % len(embeddings) for i in range(count)]],
    )


def read_embeddings(path: str) -> np.ndarray:
    """The image embeddings in a .npy file, float32 [N, width]. InputError for a file of anything else."""
    with storage.explained(path), storage.open_read(path) as file:
        data = file.read()
    try:
        header = parse_header(data[: MAX_HEADER + 12])
        plain = header.is_float and not header.bfloat16 and not header.fortran_order
        if not plain or len(header.shape) != 2 or not all(header.shape):
            raise ValueError(f"a .npy file of {header}")
        values = np.frombuffer(data, header.dtype, offset=header.offset, count=header.shape[0] * header.shape[1])
    except ValueError as error:
        raise InputError(f"{path} is {error}, but embeddings must be a .npy file of numbers [N, width]") from None
    return values.reshape(header.shape).astype(np.float32)


def _read_edit(config: PromptConfig, edit: EditConfig) -> ImageEdit:
    masks = [read_mask(path) for path in config.mask]
    return ImageEdit([read_image(path) for path in config.init_image], masks or None, edit)


def _prompts(config: PromptConfig) -> Sequence[str]:
    files = [config.prompts_file] if config.prompts_file else _text_files(config.data_dir)
    if files:
        prompts = [line.strip() for path in files for line in storage.read_text(path).splitlines()]
    elif config.data_dir:
        prompts = read_captions(config.data_dir, config.caption_field, config.num_samples)
    else:
        # a single empty prompt is valid: images without a caption
        return [part.strip() for part in config.prompts.split("|")]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise InputError(f"there are no prompts in {', '.join(files or config.data_dir)}: write one per line")
    return prompts


def _text_files(sources: Sequence[str]) -> list[str]:
    """The text files among ``sources`` and in folders of text files; empty for shards. InputError for both together."""
    found = [(source, _prompt_files(source)) for source in sources]
    texts, shards = ([source for source, files in found if bool(files) == wanted] for wanted in (True, False))
    if texts and shards:
        raise InputError(
            f"--data_dir names text files ({', '.join(texts)}) and shards ({', '.join(shards)}): give one or the other"
        )
    return [path for _, files in found for path in files]


def _prompt_files(source: str) -> list[str]:
    """The text files that a source stands for; none for shards."""
    if source.endswith(".txt"):
        return [source]
    if storage.is_remote(source) or not os.path.isdir(source):
        return []
    files = storage.list_files(source, recursive=True)
    return [] if any(path.lower().endswith(".tar") for path in files) else [p for p in files if p.endswith(".txt")]
