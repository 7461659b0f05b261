"""Whether a request fits the stages of a cascade: the size that it gives each, from that of the images or from what the
cascade continues from; what of it would have no effect, refused, so that nobody believes it had one; and what a stage
cannot do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..config import Fault, InputError, named
from ..diffusion.editing import EditConfig, shortened
from ..diffusion.guidance import thresholding
from ..diffusion.tiling import check_tiles
from ..images.files import fit_image
from ..images.signal import check_pixels
from ..randomness import check_seeds
from .classifier import check_guided
from .lora import loras_of
from .request import Request, in_turn
from .stage import Stage, StageJob
from .stage_settings import ONLY, StageSettings


def trained_size(stages: Sequence[Stage]) -> int:
    """Width and height in pixels of the last stage's training images."""
    return stages[-1].image_size * stages[-1].signal.scale


def with_low_res(request: Request, stages: Sequence[Stage]) -> Request:
    """The request with the pictures that are reconstructed cut to their size. InputError for no pipeline of stages
    B and A."""
    if request.reconstruct is None:
        return request
    if not stages[0].reconstructs:
        raise InputError(
            f"there are pictures to reconstruct ({named('reconstruct')}), which stages B and A do alone: give them "
            f"with {named('stage_b')} and {named('stage_a')}, without {named('model_path')}"
        )
    size = request.size or (trained_size(stages),) * 2
    _check_multiples("size", *size, stages[0].signal.scale * stages[0].divisor, f"change {named('sample_size')}")
    images = []
    for image in itertools.islice(request.reconstruct, len(request)):
        check_pixels("a picture to reconstruct", image, "[H, W, 3]")
        images.append(fit_image(image, size))
    return replace(request, low_res=in_turn(np.stack(images), len(request)), reconstruct=None, size=None)


def stage_sizes(request: Request, stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Height and width of each stage's signal. InputError if ``size`` or ``low_res`` does not fit."""
    size, low_res = request.size, request.low_res
    first, last, factor = stages[0], stages[-1], math.prod(stage.factor for stage in stages)
    if low_res is None and first.reconstructs:
        raise InputError(
            f"{first.path} is a stage B alone, which reconstructs pictures: give them with {named('reconstruct')}, "
            f"or a stage C with {named('model_path')}"
        )
    if first.is_upsampler != (low_res is not None):
        raise InputError(
            f"low-resolution images (low_res, {named('low_res_dir')}) are required by upsamplers without a base "
            "generator, and by these only"
        )
    divisor = _divisor(stages)
    if low_res is None:
        height, width = size or (trained_size(stages),) * 2
        scale = last.signal.scale
        _check_multiples("size", height, width, scale * divisor, f"change {named('sample_size')}")
        height, width = height // scale, width // scale
    else:
        if size:
            raise InputError(
                f"size is set, but it follows from the low-resolution images: leave it ({named('sample_size')}) out"
            )
        scale, needed = first.signal.scale, divisor // math.gcd(divisor, factor)
        _check_multiples("low_res", low_res.shape[1], low_res.shape[2], scale * needed, "crop the images")
        height, width = (factor * length // scale for length in low_res.shape[1:3])
    sizes = [(height, width)]
    for before, after in reversed(list(itertools.pairwise(stages))):
        sizes.insert(0, after.size_before(sizes[0], before))
    return sizes


def size_multiple(stages: Sequence[Stage]) -> int:
    """What height and width in pixels of the last stage's images must be multiples of."""
    return stages[-1].signal.scale * _divisor(stages)


def _divisor(stages: Sequence[Stage]) -> int:
    """What both sides of the last stage's signal must be multiples of."""
    divisor = 1
    for stage in stages:
        divisor = stage.divisor_after(divisor)
    return divisor


def _check_multiples(name: str, height: int, width: int, multiple: int, advice: str) -> None:
    if any(length < 1 or length % multiple for length in (height, width)):
        raise InputError(
            f"{name} is {width}×{height}, but width and height must be multiples of {multiple}, the networks' divisor: "
            f"{advice}"
        )


def check_used(request: Request, settings: Sequence[StageSettings], stages: Sequence[Stage]) -> None:
    """InputError for prompts, labels, pictures, embeddings and edits that no stage uses. settings: of each stage."""
    given = [each.lora.path for each in stages[0].guide_loras.loras]
    if all(chosen.classifier is None for chosen in settings):
        check_guided(given)
    InputError.check(_unused(request, settings, stages, given))


def _unused(
    request: Request, settings: Sequence[StageSettings], stages: Sequence[Stage], given: Sequence[str]
) -> Iterator[str | Fault]:
    """given: the LoRAs of classifiers."""
    has_text = any(stage.reads_text for stage in stages)
    reads_image = any(stage.reads_embeddings for stage in stages)
    reads_text = any(stage.reads_text_states for stage in stages)
    found = [stage.classifier(chosen) for stage, chosen in zip(stages, settings, strict=True)]
    classifiers = [classifier for classifier in found if classifier is not None]
    if given and not all(loras_of(classifier.saved) for classifier in classifiers):
        yield (
            f"{given[0]} was trained for a classifier, but the one here was loaded without it: give the classifier "
            "by its path, or load it by load_classifier(…, lora=…)"
        )
    guides_by = {classifier.reads for classifier in classifiers}
    stands_in = reads_image and request.images is None and request.embeddings is None
    encoded = stands_in or (reads_text and request.text_states is None)
    if any(request.prompts) and not (has_text or encoded or "prompts" in guides_by):
        if reads_image or reads_text:
            yield (
                "prompts are given, but this decoder reads no text beside images, embeddings or text_states: leave the "
                "prompts empty"
            )
        else:
            yield "prompts are given, but this generator has no text encoder: leave them empty"
    if request.negative_prompt and not has_text:
        yield Fault.of(request, "negative_prompt", "this generator has no text encoder: leave it out")
    if request.labels is not None and not ("labels" in guides_by or any(stage.num_classes for stage in stages)):
        yield Fault("labels", "are given, but this generator is not class-conditional: leave them out")
    for name in ("images", "embeddings"):
        if getattr(request, name) is not None and not any(stage.takes_embeddings for stage in stages):
            yield Fault(name, "are given, but no stage is conditioned on image embeddings: leave them out")
    if request.text_states is not None and not reads_text:
        yield "text_states are given, but no stage is conditioned on text encodings: leave them out"
    steered = any(stage.steering is not None for stage in stages)
    if request.control is not None and not steered:
        yield f"control is given, but there is no ControlNet: give it ({named('controlnet')}), or leave control out"
    if steered and request.control is None:
        yield f"there is a ControlNet, but no picture to control by: give control ({named('control_image')})"
    edit = request.edit
    if edit is not None and stages[0].is_upsampler and (edit.masks is None or edit.config != EditConfig()):
        yield (
            f"images to edit are given, but there is no base generator: upsamplers alone support a mask "
            f"({named('mask')}) only, without strength, variation, inpaint_resamples and inpaint_jump"
        )


def check_job(stage: Stage, job: StageJob) -> None:
    """InputError for a job that a stage cannot do, before any weights are loaded."""
    request, settings = job.request, job.settings
    stage.unet.check_size(*job.size)
    _check_settings(stage, settings)
    settings.guidance.scales(stage.guidable(stage.conditioning(request, range(len(request))[:1])))
    for name in ("guidance_scale", "guidance_scale_end") if stage.never_dropped else ():
        if (scale := getattr(settings.guidance, name)) not in (None, 1.0):
            raise InputError(
                f"{name} is {scale:g}, but this network was trained without dropping its conditions "
                f"({stage.never_dropped}), so it has nothing to guide by: set it to 1"
            )
    if (scale := settings.guidance.perturbed_attention_scale) and not stage.unet.has_self_attention:
        raise InputError(f"perturbed_attention_scale is {scale:g}, but this network has no self-attention: set it to 0")
    thresholding(settings.guidance, stage.signal.value_range)
    process = stage.process(settings)
    if stage.steering and request.control:
        stage.steering.check(request.control, job.size, stage.signal)
    if settings.seed is not None:
        check_seeds([settings.seed, settings.seed + len(request) - 1], stage.flags.flag("seed"))
    if request.edit is not None:
        settings.sampler.check_edit(request.edit.config)
        for i in range(len(request.edit.images)):  # one at a time to save memory
            edit = request.edit.at([i], job.size, stage.signal)
        shortened(process, edit.strength)
    if (classifier := stage.classifier(settings)) is not None:
        classifier.check_fits(job.size, stage.signal, stage.tokenizer)
        classifier.check_gradient(settings.classifier_gradient)
        classifier.check_labels(request.labels)


def _check_settings(stage: Stage, settings: StageSettings) -> None:
    """InputError for settings that this kind of stage does not have."""
    for name in stage.has_no:
        if getattr(settings, name) != getattr(StageSettings, name):
            raise InputError(Fault.of(settings, name, f"only {ONLY[name]} have it"))
    stage.degradation.check_levels(settings.noise_level, settings.blur_level)
    if settings.tile_size:
        check_tiles(settings.tile_size, settings.tile_overlap, stage.tile_divisor)
