"""Settings of ``sample.py``: which prompts, how many pictures, and where they go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import storage
from ..config import expectations, option, section
from ..data.caption_list import read_captions
from ..diffusion.diffusion_config import DiffusionConfig
from ..diffusion.editing import EditConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..distributed.launch import DistributedConfig
from ..errors import InputError, quantity
from ..images.files import read_low_res, read_mask, read_picture
from ..models.generator import GeneratorConfig
from ..models.noised_clip import NoisedClipConfig
from ..sampling.classifier import ClassifierConfig
from ..sampling.request import PictureEdit, UpsamplersConfig
from ..training.precision import PRECISIONS

ExpectedModel = expectations(GeneratorConfig, "Checks of the checkpoint's network")
ExpectedDiffusion = expectations(DiffusionConfig, "Checks of the checkpoint's diffusion process")
ExpectedClassifier = expectations(
    NoisedClipConfig, "Checks of the classifier's network", leave_out=("image_size", "text_length", "dropout_text")
)


@dataclass(frozen=True)
class PromptConfig:
    """What to sample"""

    model_path: str = option("", "checkpoint of a generator: ema_….pt or model….pt, local or remote")
    prompts: str = option("", "prompts, separated by |")
    prompts_file: str = option("", "text file with one prompt a line")
    data_dir: tuple[str, ...] = option((), "text files with one prompt a line, folders of these, or shards whose "
                                           "captions are the prompts (see caption_field)")  # fmt: skip
    caption_field: str = option("txt", "where captions are in shards: the ending of a text member, or json:FIELD")
    low_res_dir: str = option("", "folder of pictures, all of one size, that up-samplers enlarge without a base "
                                  "generator; prompts are taken in the order of their names")  # fmt: skip
    init_image: tuple[str, ...] = option((), "pictures to start from, taken in turn: changed as a whole (strength), "
                                             "varied (variation), or painted anew where a mask says so")  # fmt: skip
    mask: tuple[str, ...] = option((), "masks of init_image, of the same sizes, taken in turn: white is painted anew, "
                                       "black is kept")  # fmt: skip
    labels: tuple[int, ...] = option((), "classes for a class-conditional generator, taken in turn")
    negative_prompt: str = option("", "what guidance leads away from; empty = no caption")
    num_samples: int = option(0, "pictures to make, taking the prompts in turn; 0 = one a prompt")
    seed: int = option(0, "picture i follows from seed + i alone")
    batch_size: int = option(16, "pictures made at once by each process")
    sample_size: tuple[int, ...] = option((), "HEIGHT,WIDTH of the pictures in pixels, after all up-samplers; none = "
                                              "as trained")  # fmt: skip
    precision: str = option("auto", "arithmetic of the network", choices=PRECISIONS)
    bpe_path: str = option("", "where the tokenizer's merge file is now, if it has moved since training")
    logdir: str = option("", "folder for the pictures; empty = $OPENAI_LOGDIR, else a fresh temporary folder")

    def __post_init__(self):
        if not self.model_path and not self.low_res_dir:
            raise InputError("--model_path is needed: an ema_….pt or model….pt file that training wrote (or, to "
                             "enlarge pictures, --low_res_dir and --upsampler_paths)")  # fmt: skip
        if self.model_path and self.low_res_dir:
            raise InputError("--low_res_dir holds what up-samplers enlarge instead of what a base generator makes: "
                             "leave --model_path or --low_res_dir out")  # fmt: skip
        if self.mask and not self.init_image:
            raise InputError(
                "--mask says where a picture is painted anew, but there is none: give it with --init_image"
            )
        if len([given for given in (self.prompts, self.prompts_file, self.data_dir) if given]) > 1:
            raise InputError("--prompts, --prompts_file and --data_dir exclude each other; give one of them")
        if len({source.endswith(".txt") for source in self.data_dir}) > 1:
            raise InputError("--data_dir names both text files and shards; give one or the other")
        if self.num_samples < 0 or self.batch_size < 1:
            raise InputError(f"num_samples is {self.num_samples} and batch_size {self.batch_size}, but they must be at "
                             "least 0 and 1")  # fmt: skip
        if self.sample_size and (len(self.sample_size) != 2 or min(self.sample_size) < 1):
            raise InputError(f"sample_size is {','.join(map(str, self.sample_size))}, but must be HEIGHT,WIDTH")


@dataclass(frozen=True)
class SampleRun:
    """All settings of ``sample.py``."""

    what: PromptConfig = section(PromptConfig)
    sampler: SamplerConfig = section(SamplerConfig)
    guidance: GuidanceConfig = section(GuidanceConfig)
    upsamplers: UpsamplersConfig = section(UpsamplersConfig)
    edit: EditConfig = section(EditConfig)
    classifier: ClassifierConfig = section(ClassifierConfig)
    model: ExpectedModel = section(ExpectedModel)
    diffusion: ExpectedDiffusion = section(ExpectedDiffusion)
    classifier_model: ExpectedClassifier = section(ExpectedClassifier)
    distributed: DistributedConfig = section(DistributedConfig)

    def __post_init__(self):
        if self.edit != EditConfig() and not self.what.init_image:
            raise InputError("strength, variation, inpaint_resamples and inpaint_jump say how a picture is changed, "
                             "but there is none: give it with --init_image")  # fmt: skip
        if self.upsamplers != UpsamplersConfig() and not self.upsamplers.upsampler_paths:
            raise InputError("settings of up-samplers are given, but none of these: give them with --upsampler_paths")
        if self.what.low_res_dir and not self.upsamplers.upsampler_paths:
            raise InputError("--low_res_dir holds pictures to be enlarged, but there is no up-sampler: give one with "
                             "--upsampler_paths")  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What is asked for, as arguments of ``Pipeline.sample``: one entry a picture."""

    prompts: list[str]
    seeds: list[int]
    labels: list[int] | None
    low_res: np.ndarray | None
    edit: PictureEdit | None


def read_wanted(config: PromptConfig, edit: EditConfig) -> Wanted:
    """The prompts, seeds, … of exactly ``num_samples`` pictures. InputError for prompts or pictures that are missing or
    cannot be used."""
    prompts, low_res = _prompts(config), None
    count = config.num_samples or max(len(prompts), len(config.labels), len(config.init_image))
    if config.low_res_dir:
        names, low_res = read_low_res(config.low_res_dir)
        if count > len(names) or config.num_samples:
            raise InputError(f"{config.low_res_dir} holds {quantity(len(names), 'picture')}, and as many are made: "
                             "give no more prompts, labels or init_image, and leave num_samples out")  # fmt: skip
        count = len(names)
    return Wanted(
        [prompts[i % len(prompts)] for i in range(count)],
        [config.seed + i for i in range(count)],
        [config.labels[i % len(config.labels)] for i in range(count)] if config.labels else None,
        low_res,
        _read_edit(config, edit) if config.init_image else None,
    )


def _read_edit(config: PromptConfig, edit: EditConfig) -> PictureEdit:
    masks = [read_mask(path) for path in config.mask]
    return PictureEdit([read_picture(path) for path in config.init_image], masks or None, edit)


def _prompts(config: PromptConfig) -> Sequence[str]:
    texts = [config.prompts_file] if config.prompts_file else _text_files(config.data_dir)
    if texts:
        prompts = [line.strip() for path in texts for line in storage.read_text(path).splitlines()]
    elif config.data_dir:
        prompts = read_captions(config.data_dir, config.caption_field, config.num_samples)
    else:
        prompts = [part.strip() for part in config.prompts.split("|")]
        return prompts  # a single empty prompt asks for pictures without a caption
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise InputError(f"there are no prompts in {', '.join(texts or config.data_dir)}; give one a line")
    return prompts


def _text_files(sources: Sequence[str]) -> list[str]:
    """The text files among ``sources``, and those in folders of texts; empty when these are shards."""
    found = [path for path in sources if path.endswith(".txt")]
    for folder in sources:
        if not storage.is_remote(folder) and os.path.isdir(folder):
            files = storage.list_files(folder, recursive=True)
            if not any(path.lower().endswith(".tar") for path in files):
                found += [path for path in files if path.endswith(".txt")]
    return found
