"""A cascade of networks: from checkpoints, prompts and embeddings to images. For library users, ``sample.py`` and
evaluation."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.checkpoint import attention_order
from ..checkpoints.model_folder import find_file, open_model
from ..config import Fault, InputError, disagreements, given, named, quantity
from ..distributed.world import SINGLE, World
from ..text.tokenizer import Tokenizer
from .calling import Calls, Loaded
from .clips import DecoderClip, embedded
from .control import Steering
from .fitting import check_job, check_used, size_multiple, stage_sizes, trained_size, with_low_res
from .request import Request
from .stage import Stage, StageJob, Watch
from .stage_settings import SETTINGS, StageSettings
from .stages import adapt, attach_companions, load_stages
from .telling import StepsBar, summary, warn_of_other_noise

Upsampling = StageSettings | Mapping[str, Any]


class Pipeline(Calls):
    """A base generator and upsamplers, each of which upsamples the images of the stage before it; or upsamplers alone,
    for existing images. Made by ``load``.

    clip_make, clip_path: of the CLIP of a decoder's training, as for ``DecoderClip``.

    Raises InputError for no stage, a base generator that is not first, stages that do not fit each other, and a CLIP
    without a decoder.
    """

    def __init__(self, stages: Sequence[Stage], clip_make: str = "", clip_path: str = ""):
        self.stages, self.clip = list(stages), DecoderClip(stages, clip_make, clip_path)
        if not self.stages:
            raise InputError(f"a pipeline needs at least one generator: a base ({named('model_path')}) or an upsampler")
        for before, after in itertools.pairwise(self.stages):
            after.check_after(before)
        self.stages[-1].check_last()
        for i, stage in enumerate(self.stages):
            for earlier in self.stages[:i]:
                stage.check_beside(earlier)

    @property
    def image_size(self) -> int:
        """Width and height in pixels of the last stage's training images."""
        return trained_size(self.stages)

    @property
    def size_multiple(self) -> int:
        """What height and width in pixels of the last stage's images must be multiples of."""
        return size_multiple(self.stages)

    @property
    def has_base(self) -> bool:
        return not self.stages[0].is_upsampler

    @property
    def factor(self) -> int:
        """The upsampling factor of all stages together."""
        return math.prod(stage.factor for stage in self.stages)

    @property
    def upsampler_defaults(self) -> list[StageSettings]:
        """How the upsamplers' checkpoints say to sample with them."""
        return [stage.defaults for stage in self.stages if stage.is_upsampler]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The first stage's; None for a generator without text."""
        return self.stages[0].tokenizer

    @property
    def step(self) -> int:
        """Training steps of the first stage."""
        return self.stages[0].saved.step

    def sample(
        self,
        prompts: str | Sequence[str] | None = None,
        seed: int = 0,
        *,
        upsampling: Upsampling | Sequence[Upsampling] | None = None,
        progress: bool = True,
        world: World | None = None,
        watch: Watch | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Sample one image per prompt, embedding or picture. Returns the last stage's images, uint8 [N, height, width,
        3].

        prompts, seed: as for ``Request.of``.
        options:    what to make: the other arguments of ``Request.of`` and fields of ``Request``, such as
                    ``num_samples``, ``size``, ``labels``, ``images``, ``edit``, ``control``; and how the base generator
                    or stage C samples: fields of ``StageSettings``, ``SamplerConfig`` and ``GuidanceConfig``, such as
                    ``sampler``, ``steps``, ``guidance_scale``, ``classifier``, ``shift``; None or not
                    given = as its checkpoint says, but batches of 16.
        upsampling: settings of the upsamplers or stage B: one for each, one for all, or None for what their checkpoints
                    say. A mapping has the settings, by their names, that replace those of the checkpoint.
        progress:   show progress bars, on a terminal and in a notebook.
        world:      processes that share the work (``distributed.launch``); each gets all images.
        watch:      called with the ``Progress`` of every step; what it raises ends the sampling.

        Raises InputError, before any weights are loaded, for sizes that do not fit, missing or impossible labels,
        prompts and settings without effect, settings that a stage does not support (naming it), and a classifier that
        does not fit its generator.
        """
        chosen = {name: options.pop(name) for name in (*SETTINGS, "guidance") if name in options}
        request = Request.of(prompts, seed, **options)
        defaults = self.stages[0].defaults if self.has_base else StageSettings()
        base = defaults.changed(**{"batch_size": StageSettings.batch_size, **chosen})
        settings = self.stage_settings(base, upsampling)
        return self.sample_stages(request, settings, world=world, progress=progress, watch=watch)[-1]

    def stage_settings(
        self, base: StageSettings | None = None, upsampling: Upsampling | Sequence[Upsampling] | None = None
    ) -> list[StageSettings]:
        """One StageSettings for each stage, as for ``sample_stages``.

        base:       of the base generator; None = as its checkpoint says.
        upsampling: as for ``sample``.

        Raises InputError for a wrong number of settings, and for settings of a base generator without one.
        """
        if base is None:
            base = self.stages[0].defaults if self.has_base else StageSettings()
        count = len(self.stages) - self.has_base
        if upsampling is None:
            upsampling = self.upsampler_defaults
        elif isinstance(upsampling, (StageSettings, Mapping)):
            upsampling = [upsampling] * max(count, 1)
        if len(upsampling) != count:
            raise InputError(
                f"upsampling has settings for {quantity(len(upsampling), 'upsampler')}, but the pipeline has {count}: "
                "give one for all, or one for each"
            )
        if not self.has_base and replace(base, classifier_scale=StageSettings.classifier_scale) != StageSettings():
            raise InputError(
                "sampler, steps, guidance, classifier and batch_size are set for a base generator, but "
                f"there is none: set the upsamplers' own (upsampling; their names begin with {named('upsampler_')})"
            )
        rest = [
            each if isinstance(each, StageSettings) else default.changed(**each)
            for each, default in zip(upsampling, self.upsampler_defaults, strict=True)
        ]
        return [base] * self.has_base + rest

    def sample_stages(
        self,
        request: Request,
        settings: Sequence[StageSettings],
        *,
        world: World | None = None,
        progress: bool = True,
        watch: Watch | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> list[np.ndarray]:
        """Sample the request's images. Returns every stage's images, uint8 [N, height, width, 3] each.

        settings: one for each stage, base first (see ``stage_settings``).
        tell:     called with a line about each stage's sampling before it begins, in the first process.

        ``world``, ``progress``, ``watch`` and errors as for ``sample``.
        """
        if len(settings) != len(self.stages):
            raise InputError(
                f"settings has {quantity(len(settings), 'value')}, but the pipeline has "
                f"{quantity(len(self.stages), 'stage')}: give one for each"
            )
        request = with_low_res(request, self.stages)
        sizes = stage_sizes(request, self.stages)
        check_used(request, settings, self.stages)
        request = embedded(request, self.stages, self.clip)
        jobs = self._jobs(request, settings, sizes)
        for stage, job in zip(self.stages, jobs, strict=True):
            try:
                check_job(stage, job)
            except InputError as error:
                if len(jobs) == 1:
                    raise
                raise InputError(f"{stage.path}: {error}") from None
            finally:
                stage.release()

        world = world or World(SINGLE, self.stages[0].device)
        if world.is_main:
            warn_of_other_noise(self.stages, jobs)
            if tell:
                for stage, job in zip(self.stages, jobs, strict=True):
                    tell(summary(stage, job))
        count, mine = len(request), list(range(world.rank, len(request), world.size))
        x = None if request.low_res is None else self.stages[0].from_low_res(request.low_res[mine])
        results = []
        for stage, job in zip(self.stages, jobs, strict=True):
            height, width = (stage.signal.scale * length for length in job.size)
            name = f"Upsampling to {width}×{height}" if stage.is_upsampler else "Sampling"
            batches, signals, pixels = -(-len(mine) // job.settings.batch_size), list[Tensor](), list[np.ndarray]()
            with (
                StepsBar(name, count, batches, progress and world.is_main, watch) as bar,
                contextlib.closing(stage.sample_batches(replace(job, watch=bar.step), mine, x)) as sampled,
            ):
                for batch in sampled:
                    if not stage.decodes_apart:
                        pixels.append(stage.pixels(batch))
                    if stage.decodes_apart or stage is not self.stages[-1]:  # no stage reads the last, largest one
                        signals.append(batch)
                    bar.batch(len(batch) * world.size)
            x = torch.cat(signals) if signals else None
            if stage.decodes_apart:
                pixels = [stage.pixels(signal) for signal in signals]
                stage.release()
            results.append(_interleave(world.gather(pixels), (count, *stage.picture_size(job.size), 3)))
        return results

    def _jobs(
        self, request: Request, settings: Sequence[StageSettings], sizes: Sequence[tuple[int, int]]
    ) -> list[StageJob]:
        """Each stage's part of the request."""
        edit = request.edit and request.edit.for_upsampling()
        first = 0 if self.has_base else 1
        return [
            StageJob(replace(request, edit=edit) if stage.is_upsampler else request, chosen, size, index)
            for index, (stage, chosen, size) in enumerate(zip(self.stages, settings, sizes, strict=True), start=first)
        ]

    def check(self, expected) -> None:
        """InputError if expected settings (see ``config.expectations``) differ from those of the first checkpoint."""
        first = self.stages[0]
        said: dict[str, Any] = {"class_cond": first.num_classes > 0}
        if "use_new_attention_order" in given(expected):
            order = attention_order(first.path)
            if order is None:
                warnings.warn(f"use_new_attention_order has no effect: {first.path} is of diff_dalle", stacklevel=2)
            said["use_new_attention_order"] = expected.use_new_attention_order if order is None else order
        if wrong := disagreements(expected, first.config, first.diffusion, said):
            raise InputError(f"the checkpoint has other settings: {', '.join(wrong)}; leave these flags out")


def _interleave(parts: Sequence[Sequence[np.ndarray]], shape: tuple[int, ...]) -> np.ndarray:
    """Every rank's batches of images → all images; image i comes from rank i % size. A rank may have none."""
    images = np.empty(shape, dtype=np.uint8)
    for rank, batches in enumerate(parts):
        if batches:
            images[rank :: len(parts)] = np.concatenate(batches)
    return images


def load(
    path: str | Sequence[str] = "",
    device: str | torch.device = "auto",
    precision: str = "auto",
    bpe_path: str = "",
    *,
    upsampler_paths: Sequence[str] = (),
    stage_b: str = "",
    stage_a: str = "",
    semantic: str = "",
    keep_loaded: bool | None = None,
    clip_make: str = "",
    clip_path: str = "",
    lora: str | Sequence[str] = (),
    controlnet: str = "",
    accept_changed_base: bool = False,
) -> Pipeline:
    """Generators and decoders ready to sample, from model or EMA checkpoints.

    path:            ``ema_….pt`` (better images) or ``model….pt``, local or remote; empty = upsamplers alone. A decoder
                     may be one file, or a list of files with one U-Net each. A model folder, or the name of a
                     bundled model (``models()``), brings its upsamplers and stages where none are given.
    device:          auto, cpu, cuda, cuda:1, mps, …; auto = CUDA if available, else MPS, else the CPU.
    precision:       auto, fp32, bf16 or fp16.
    bpe_path:        the tokenizers' merge file, for checkpoints of earlier versions that do not hold theirs.
    upsampler_paths: upsampler checkpoints, in order of increasing resolution.
    stage_b:         of a latent cascade, whose stage C is ``path``; without ``path`` it reconstructs pictures.
    stage_a:         of a latent cascade, which decodes what stage B makes.
    semantic:        of a latent cascade: the semantic encoder of its training, for pictures to edit or reconstruct; its
                     previewer shows what stage C makes where there is no stage B.
    keep_loaded:     keep the weights of all stages in memory; False = load each stage for its part of the work only, so
                     that a cascade needs no more memory than its largest stage; None = True for a single stage.
    clip_make, clip_path: where the CLIP of the training of a decoder or latent cascade is, if not where its checkpoint
                     says; see ``DecoderClip``. Of two CLIPs, that of the texts.
    controlnet:      checkpoint of a ControlNet that steers the generator or stage C ``path``.
    lora:            LoRA files, each as PATH or, with a factor of its changes, PATH:FACTOR; each goes to the network
                     that it was trained for.
    accept_changed_base: use ControlNet and LoRAs although the network had other weights when they were trained.

    Raises InputError for a file that is not a checkpoint of a generator, decoder or latent cascade, a tokenizer that is
    missing, stages that do not fit each other or what they were trained with, and a LoRA of another network.
    """
    arguments = dict(locals())
    first = [path] * bool(path) if isinstance(path, str) else list(path)
    if model := open_model(first[0]) if len(first) == 1 else None:
        first = [*model.paths("model_path")]
        upsampler_paths = upsampler_paths or model.paths("upsampler_paths")
        stage_b, stage_a, semantic = (
            given or "".join(model.paths(role))
            for role, given in (("stage_b", stage_b), ("stage_a", stage_a), ("semantic", semantic))
        )
    upsampler_paths = [find_file(each, "upsampler_paths") for each in upsampler_paths]
    paths = first + [stage_b] * bool(stage_b) + list(upsampler_paths)
    if not paths:
        has = f"{model.path} has only {', '.join(model.files)}" if model else "there is no checkpoint"
        raise InputError(f"{has}: give a generator's with {named('model_path')}, or upsamplers'")
    keep = len(paths) == 1 if keep_loaded is None else keep_loaded
    stages = [stage for each in paths for stage in load_stages(each, device, precision, bpe_path, keep)]
    adapt(stages, [lora] if isinstance(lora, str) else lora, accept_changed_base)
    if first and stages[0].is_upsampler:
        setting = named("stage_b" if stages[0].reconstructs else "upsampler_paths")
        raise InputError(f"{paths[0]} is an upsampler, not a base generator: give it with {setting}")
    if not first and not stages[0].is_upsampler:
        raise InputError(f"{paths[0]} is a base generator, not an upsampler: give it with {named('model_path')}")
    if stage_b and not any(stage.path == stage_b and stage.reconstructs for stage in stages):
        raise InputError(Fault("stage_b", "must be a stage B of a latent cascade", stage_b))
    if controlnet:
        if not first:
            rule = f"there is no base generator to steer: give {named('model_path')}"
            raise InputError(Fault("controlnet", rule, controlnet))
        base = stages[0]
        base.steering = Steering(controlnet, base.saved, base.device, base.precision, base.keep, accept_changed_base)
    has_companions = attach_companions(stages, stage_a, semantic, clip_make, clip_path)
    pipeline = Pipeline(stages) if has_companions else Pipeline(stages, clip_make, clip_path)
    roles = {
        "model_path": first,
        "upsampler_paths": upsampler_paths,
        "stage_b": [stage_b],
        "stage_a": [stage_a],
        "semantic": [semantic],
    }
    pipeline.loaded = Loaded(load, arguments, {role: files for role, files in roles.items() if any(files)})
    return pipeline
