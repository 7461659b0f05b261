"""The session of a run of stage B or C: its frozen networks and what identifies them, the samples, and the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from ...checkpoints.decoder import ClipConfig
from ...checkpoints.loading import open_network, open_networks
from ...config import Fault, InputError, named
from ...data.loader import Loader
from ...data.spec import CaptionSpec, ImageSpec, SampleSpec
from ...distributed.world import World
from ...embeddings.clip import load_clip
from ...embeddings.contract import Clip, weights_digest
from ...models.latent.config import LatentUnetConfig
from ...models.latent.semantic import SemanticAutoencoder
from ...models.latent.stage_a import StageA
from ...tasks.latent import IMAGE_CLIP, SEMANTIC, STAGE_A, TEXT_CLIP, LatentTask
from ...tasks.previews import LatentPreviews
from ...text.tokenizer import Tokenizer
from ..recipe import Recipe, Session
from .stored import with_stored

TEXT_NAME = "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"
IMAGE_NAME = "openai/clip-vit-large-patch14"
# The names under which the documented default CLIPs are known on the Hugging Face hub.
HUB_NAMES = {
    TEXT_NAME: ("open_clip", "ViT-bigG-14/laion2b_s39b_b160k"),
    IMAGE_NAME: ("openai", "ViT-L/14"),
}


@dataclass(frozen=True)
class Frozen:
    """The frozen networks that a stage is trained with.

    previewer: decodes semantic latents in stage C's previews.
    """

    semantic: SemanticAutoencoder
    stage_a: StageA | None = None
    previewer: SemanticAutoencoder | None = None
    text_clip: Clip | None = None
    image_clip: Clip | None = None


def identity_of(network: torch.nn.Module) -> str:
    """The same for the same weights."""
    return weights_digest(network.state_dict())


def load_stage_a(path: str, device: torch.device) -> StageA:
    """InputError for a checkpoint of anything else."""
    return cast(StageA, open_network(path, "stage_a").load(device))


def load_semantic(path: str, device: torch.device) -> SemanticAutoencoder:
    """InputError for a checkpoint of anything else."""
    return cast(SemanticAutoencoder, open_network(path, "semantic").load(device))


def named_clip(name: str, outputs: str = "unit") -> ClipConfig:
    """What a name of a CLIP stands for: a checkpoint of ``train_classifier.py`` (a path that ends with .pt), a
    documented name, or MODEL/TAG of open_clip."""
    if name in HUB_NAMES:
        return ClipConfig(*HUB_NAMES[name], outputs=outputs)
    return ClipConfig("diff_dalle" if name.endswith(".pt") else "open_clip", name, outputs=outputs)


def open_clip(
    given: str, outputs: str, known: ClipConfig | None, setting: str, device: torch.device
) -> tuple[Clip, ClipConfig]:
    """A CLIP by its name, and what to record about it. outputs: see ``Clip``. known: what the run says already.
    InputError when that is another."""
    config = named_clip(given, outputs)
    clip = load_clip(config.make, config.model, device, outputs=outputs)
    if known and known.identity and known.identity != clip.identity:
        rule = f"is {given}, whose weights are {clip.identity}, but the run has {known}: give that"
        raise InputError(Fault(setting, rule))
    return clip, replace(config, identity=clip.identity)


def outputs_of_clips(path: str | None) -> str:
    """What stage B or C of a checkpoint reads of its CLIPs; unit without a checkpoint, or without CLIPs."""
    if not path:
        return "unit"
    known = open_networks(path, ("stage_b", "stage_c"))[0].settings.trained_with
    return next((clip.outputs for clip in (known.text_clip, known.image_clip) if clip is not None), "unit")


def check_text_clip(clip: Clip, model: LatentUnetConfig) -> None:
    """InputError when the network takes text of another width or length."""
    wants = {"text_width": (model.states_width, clip.text_width), "pooled_width": (model.vector_width, clip.embed_dim)}
    for name, (expected, found) in wants.items():
        if expected and expected != found:
            rule = f"the CLIP {clip.name} has {found or 'none'}: set it to that"
            other = named("clip_text_model_name")
            raise InputError(Fault(f"model.{name}", f"{rule}, or choose another {other}", expected))
    if model.states_width and clip.text_length > model.text.text_length:
        rule = f"the CLIP {clip.name} reads {clip.text_length} tokens: raise it"
        raise InputError(Fault("model.text.text_length", rule, model.text.text_length))


def check_image_clip(clip: Clip, model: LatentUnetConfig) -> None:
    """InputError when the network takes image embeddings of another width."""
    if clip.embed_dim != model.embedding_width:
        rule = f"the CLIP {clip.name} makes embeddings of {clip.embed_dim} elements: set it to that"
        other = named("clip_image_model_name")
        raise InputError(Fault("model.image_width", f"{rule}, or choose another {other}", model.embedding_width))


def check_channels(setting: str, given: int, found: int, whose: str) -> None:
    """InputError for a network that does not take the latents of a frozen one."""
    if given != found:
        raise InputError(Fault(setting, f"the latents of {whose} have {found} channels: set it to that", given))


def latent_session(recipe: Recipe, world: World, frozen: Frozen, tokenizer: Tokenizer | None) -> Session:
    run, clip = recipe.settings, frozen.text_clip
    tokenizer = tokenizer or recipe.tokenizer()
    spec = sample_spec(run, clip, tokenizer)
    task = partial(latent_task, recipe, world, frozen, partial(run.task, frozen))
    session = Session(recipe, world, spec, task, tokenizer, text_clip=clip)
    if not run.latents_path:
        return session
    return with_stored(session, run.storable(frozen), run.needed, run.latents_path)


def sample_spec(run: Any, clip: Clip | None, tokenizer: Tokenizer | None) -> SampleSpec:
    """What a sample holds, where nothing of it is stored."""
    captions: tuple[CaptionSpec, ...] = ()
    if clip is not None:
        captions = (CaptionSpec(clip.tokenize, clip.text_length),)
    elif tokenizer:
        captions = (CaptionSpec(tokenizer, run.model.text.text_length),)
    return SampleSpec(ImageSpec((run.image_size, run.image_size)), captions)


def latent_task(
    recipe: Recipe,
    world: World,
    frozen: Frozen,
    plain: Callable[[Any], LatentTask],
    model: Any,
    name: str,
    shown: Loader,
) -> LatentTask:
    """A task with its companions and previews. plain: makes it without."""
    run, task = recipe.settings, plain(model)
    networks = {
        STAGE_A: frozen.stage_a,
        SEMANTIC: frozen.semantic,
        TEXT_CLIP: frozen.text_clip,
        IMAGE_CLIP: frozen.image_clip,
    }
    trained = set(task.modules())
    for companion, network in networks.items():
        if network is not None and network not in trained:
            task.add_companion(companion, network)
    if recipe.sample_interval:
        sampling, rows = run.sampling, 2 if recipe.optims[name].ema_rate else 1
        passes = rows * sampling.sampler_config.evaluations * sampling.guidance.passes(True)
        count, steps = recipe.affordable(world, run.loop.preview_samples, sampling.steps, passes, once=1)
        shown = shown.reading_whole() if run.latents_path else shown
        batch = replace(shown.first(count), index=torch.arange(count))
        captions, sampling = shown.first_captions(count), replace(sampling, steps=steps)
        task.preview = LatentPreviews(batch, captions, run.signal(frozen), sampling, recipe.training.microbatch)
    return task
