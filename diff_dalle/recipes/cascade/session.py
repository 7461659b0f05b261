"""The session of a run of stage B or C: what a sample holds, and the task with its frozen networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...data.loader import Loader
from ...data.spec import CaptionSpec, ImageSpec, SampleSpec
from ...distributed.world import World
from ...embeddings.contract import Clip
from ...tasks.latent import IMAGE_CLIP, SEMANTIC, STAGE_A, TEXT_CLIP, LatentTask
from ...tasks.latent_previews import LatentPreviews
from ...text.tokenizer import Tokenizer
from ..previewing import affordable
from ..recipe import Recipe, Session
from .companions import Frozen
from .stored import with_stored


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
    plain: Callable[[nn.Module], LatentTask],
    model: nn.Module,
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
        count, steps = affordable(recipe, world, run.loop.preview_samples, sampling.steps, passes, once=1)
        shown = shown.reading_whole() if run.latents_path else shown
        batch = replace(shown.first(count), index=torch.arange(count))
        captions, sampling = shown.first_captions(count), replace(sampling, steps=steps)
        task.preview = LatentPreviews(batch, captions, run.signal(frozen), sampling, recipe.training.microbatch)
    return task
