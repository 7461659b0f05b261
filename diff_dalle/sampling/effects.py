"""What of a request would have no effect: refused, so that nobody believes it had one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import Fault, InputError, named
from ..diffusion.editing import EditConfig
from .classifier import check_guided
from .lora import loras_of
from .request import Request
from .stage import Stage
from .stage_settings import StageSettings


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
