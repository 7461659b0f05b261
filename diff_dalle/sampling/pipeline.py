"""Checkpoints and prompts → images, through the whole cascade: what library users, ``sample.py`` and the evaluation
call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from ..config import disagreements
from ..diffusion.editing import EditConfig
from ..diffusion.guidance import GuidanceConfig
from ..diffusion.sampling import SamplerConfig
from ..distributed.world import SINGLE, World
from ..errors import InputError, quantity
from ..text.tokenizer import Tokenizer
from .classifier import Classifier
from .request import PictureEdit, Request, StageSettings, UpsamplersConfig, check_pixels
from .stage import Stage, load_stage


class Pipeline:
    """Generators, one after another: the base first, then up-samplers, each of what the one before makes; or
    up-samplers alone, for pictures that are there already. Made by ``load``.

    Raises InputError for no stage, a base that is not at the beginning, and stages whose sizes do not fit together.
    """

    def __init__(self, stages: Sequence[Stage]):
        self.stages = list(stages)
        if not self.stages:
            raise InputError("a pipeline needs at least one generator, a base (--model_path) or an up-sampler")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if not after.config.is_upsampler:
                raise InputError(f"{after.path} is a base generator, not an up-sampler: only --model_path can be one")
            small = after.config.low_res.small_size
            if before.image_size != small:
                raise InputError(
                    f"{before.path} makes pictures of {before.image_size} pixels, but {after.path} enlarges ones of "
                    f"{small} (its small_size): give stages whose sizes follow on"
                )

    @property
    def image_size(self) -> int:
        """Side in pixels of the pictures, when each stage makes what it was trained on."""
        return self.stages[-1].image_size

    @property
    def has_base(self) -> bool:
        return not self.stages[0].config.is_upsampler

    @property
    def factor(self) -> int:
        """How many times larger the pictures are than those of the base, or than what is enlarged."""
        return math.prod(stage.config.factor for stage in self.stages)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The first stage's; None when it does not read text."""
        return self.stages[0].tokenizer

    @property
    def step(self) -> int:
        """How long the first stage was trained."""
        return self.stages[0].step

    def sample(self, *arguments, **keywords) -> np.ndarray:
        """The pictures of the last stage of ``sample_stages``, which has the arguments: uint8 [N, height, width, 3]."""
        return self.sample_stages(*arguments, **keywords)[-1]

    def sample_stages(
        self,
        prompts: str | Sequence[str],
        seed: int = 0,
        *,
        seeds: Sequence[int] | None = None,
        labels: Sequence[int] | None = None,
        negative_prompt: str = "",
        size: tuple[int, int] | None = None,
        batch_size: int = 16,
        sampler: SamplerConfig | None = None,
        guidance: GuidanceConfig | None = None,
        classifier: Classifier | str | None = None,
        classifier_prompts: Sequence[str] | None = None,
        classifier_scale: float = 1.0,
        classifier_gradient: str = "x_t",
        upsampling: StageSettings | Sequence[StageSettings] | None = None,
        low_res: np.ndarray | None = None,
        edit: PictureEdit | None = None,
        progress: bool = True,
        world: World | None = None,
    ) -> list[np.ndarray]:
        """Every stage's pictures, one a prompt: uint8 [N, height, width, 3] each.

        seed:            picture i has seed + i, and depends on that alone: not on the batch or the other prompts.
        seeds:           the pictures' own seeds, instead.
        labels:          classes, one a prompt, for a class-conditional generator.
        negative_prompt: what guidance leads away from; empty = no caption.
        size:            height and width of the last stage's, anything that the networks divide; None = as trained, or
                         as ``low_res`` enlarged.
        batch_size:      pictures at a time, per process; guidance doubles the memory that takes.
        classifier:      a noised CLIP (``load_classifier``, or its path) that guides too, with strength
                         ``classifier_scale``, towards ``classifier_prompts`` (None = the prompts); its gradient is
                         taken at "x_t", or at the expected "x_start" and through the generator.
        upsampling:      the same settings, from ``sampler`` to ``batch_size`` and more, of the up-samplers: one for
                         each, one for all, or None for ``sample.py``'s defaults. Those above are the base's.
        low_res:         pictures to be enlarged, uint8 [N, h, w, 3], for up-samplers without a base.
        edit:            pictures to start from: image to image, inpainting, variations (see diffusion/editing.py).
        world:           the processes that share the work (``distributed.launch``); all get all pictures.

        Raises InputError, before a generator's weights are read, for sizes that do not fit, for missing or impossible
        labels, for prompts and settings that nobody reads, for settings that a stage cannot have (naming it), and for a
        classifier that does not fit its generator.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = range(seed, seed + len(prompts)) if seeds is None else seeds
        request = Request(prompts, seeds, labels, negative_prompt, classifier_prompts, edit)
        base = StageSettings(sampler or SamplerConfig(), guidance or GuidanceConfig(), classifier, classifier_scale,
                             classifier_gradient, batch_size)  # fmt: skip
        settings, sizes = self._settings(base, upsampling), self._sizes(size, low_res, len(prompts))
        self._check_read(request, settings)
        edit = request.edit and request.edit.for_upsampling()
        requests = [replace(request, edit=edit) if stage.config.is_upsampler else request for stage in self.stages]
        work = list(zip(self.stages, requests, settings, sizes, strict=True))
        for stage, asked, chosen, each in work:
            try:
                stage.check(asked, chosen, each)
            except InputError as error:
                if len(work) == 1:
                    raise
                raise InputError(f"{stage.path}: {error}") from None

        world = world or World(SINGLE, self.stages[0].device)
        mine = list(range(world.rank, len(prompts), world.size))
        made, images = [], None if low_res is None else low_res[mine]
        for number, (stage, asked, chosen, each) in enumerate(work, start=0 if self.has_base else 1):
            name = f"Enlarging to {each[1]}×{each[0]}" if stage.config.is_upsampler else "Sampling"
            with tqdm(total=len(prompts), unit="image", desc=name, disable=not (progress and world.is_main)) as bar:
                images = stage.sample(asked, mine, chosen, each, images, number, lambda count, bar=bar: bar.update(
                    min(count * world.size, len(prompts) - bar.n)))  # fmt: skip
            everyone = np.empty((len(prompts), *each, 3), dtype=np.uint8)
            for rank, part in enumerate(world.gather(images)):
                everyone[rank :: world.size] = part
            made.append(everyone)
        return made

    def _settings(self, base: StageSettings, upsampling) -> list[StageSettings]:
        """One for each stage. InputError unless there are as many as up-samplers, and for a base's without one."""
        count = len(self.stages) - self.has_base
        if upsampling is None:
            upsampling = [UpsamplersConfig().setting()] * count
        elif isinstance(upsampling, StageSettings):
            upsampling = [upsampling] * max(count, 1)
        if len(upsampling) != count:
            raise InputError(f"upsampling has settings for {quantity(len(upsampling), 'up-sampler')}, but the pipeline "
                             f"has {count}: give one for all, or one for each")  # fmt: skip
        if not self.has_base and replace(base, classifier_scale=1.0) != StageSettings():
            raise InputError("sampler, timestep_respacing, guidance, classifier and batch_size are given for a base "
                             "generator, but there is none: give the up-samplers' own (upsampling; their flags begin "
                             "with --upsampler_)")  # fmt: skip
        return [base] * self.has_base + list(upsampling)

    def _sizes(self, size: tuple[int, int] | None, low_res: np.ndarray | None, count: int) -> list[tuple[int, int]]:
        """Height and width of each stage's pictures. InputError when ``size`` or ``low_res`` does not fit."""
        if self.has_base == (low_res is not None):
            raise InputError("pictures to be enlarged (low_res, --low_res_dir) are needed by up-samplers without a "
                             "base generator, and by these alone")  # fmt: skip
        factors = [math.prod(after.config.factor for after in self.stages[i + 1 :]) for i in range(len(self.stages))]
        divisors = [stage.config.unet.divisor for stage in self.stages]
        least = math.lcm(*(divisor * factor for divisor, factor in zip(divisors, factors, strict=True)))
        if low_res is None:
            size = tuple(size or (self.image_size, self.image_size))
            if any(edge < 1 or edge % least for edge in size):
                raise InputError(f"pictures of {size[1]}×{size[0]} are asked for, but each side must be a multiple of "
                                 f"{least}, by which the networks divide: change --sample_size")  # fmt: skip
        else:
            check_pixels("low_res", low_res, "[N, h, w, 3]")
            if len(low_res) != count:
                raise InputError(f"there are {quantity(len(low_res), 'picture')} to be enlarged for "
                                 f"{quantity(count, 'prompt')}: give one for each")  # fmt: skip
            if size:
                raise InputError("size is given, but what is enlarged decides it: leave it (--sample_size) out")
            size = tuple(self.factor * edge for edge in low_res.shape[1:3])
            if any(edge < 1 or edge % least for edge in size):
                small = least // math.gcd(least, self.factor)
                raise InputError(f"the pictures to be enlarged are {low_res.shape[2]}×{low_res.shape[1]}, but each "
                                 f"side must be a multiple of {small}, as the networks divide: cut them")  # fmt: skip
        return [(size[0] // factor, size[1] // factor) for factor in factors]

    def _check_read(self, request: Request, settings: Sequence[StageSettings]) -> None:
        """InputError for prompts, classes and settings that nobody would look at."""
        reads = any(stage.tokenizer is not None for stage in self.stages)
        steered = any(chosen.classifier is not None for chosen in settings)
        if any(request.prompts) and not reads and not steered:
            raise InputError("prompts are given, but this generator does not read text: leave them empty")
        if request.negative_prompt and not reads:
            prompt = request.negative_prompt
            raise InputError(f"negative_prompt is {prompt!r}, but this generator does not read text")
        if request.labels is not None and not any(stage.config.unet.num_classes for stage in self.stages):
            raise InputError("labels are given, but this generator is not conditioned on classes")
        edit = request.edit
        if edit is not None and not self.has_base and (edit.masks is None or edit.config != EditConfig()):
            raise InputError("pictures to start from are given, but there is no base generator that could start from "
                             "them: without one, only a mask (--mask) means anything, and no strength, variation, "
                             "inpaint_resamples or inpaint_jump")  # fmt: skip

    def check(self, expected) -> None:
        """InputError when settings asked for (see ``config.expectations``) are not those of the first checkpoint."""
        first = self.stages[0]
        wrong = disagreements(expected, first.config) + disagreements(expected, first.diffusion)
        if wrong:
            raise InputError(f"the checkpoint has other settings: {', '.join(wrong)}; leave these flags out")


def load(path: str = "", device: str = "auto", precision: str = "auto", bpe_path: str = "", *,
         upsampler_paths: Sequence[str] = (), keep_loaded: bool | None = None) -> Pipeline:  # fmt: skip
    """Generators ready to sample, from model or EMA checkpoints alone.

    path:            ``ema_….pt`` (better pictures) or ``model….pt``, local or remote; empty = up-samplers alone.
    device:          auto, cpu, cuda, cuda:1, mps, …; auto takes CUDA, then MPS, then the CPU.
    precision:       auto, fp32, bf16 or fp16.
    bpe_path:        where the tokenizers' vocabulary is now, if it was a file that has moved since training.
    upsampler_paths: checkpoints of up-samplers, in the order in which they enlarge.
    keep_loaded:     keep the weights of all stages in memory; False = each only while it works, so that a cascade needs
                     no more memory than its largest stage. None = only where there is a single stage.

    Raises InputError for a file that is no generator's checkpoint, whose tokenizer cannot be found, or whose size does
    not fit the other stages'.
    """
    paths = [path] * bool(path) + list(upsampler_paths)
    if not paths:
        raise InputError("there is no checkpoint: give a generator's with --model_path, or up-samplers'")
    keep = len(paths) == 1 if keep_loaded is None else keep_loaded
    stages = [load_stage(each, device, precision, bpe_path, keep) for each in paths]
    if path and stages[0].config.is_upsampler:
        raise InputError(f"{path} is an up-sampler, not a base generator: give it with --upsampler_paths")
    if not path and not stages[0].config.is_upsampler:
        raise InputError(f"{paths[0]} is a base generator, not an up-sampler: give it with --model_path")
    return Pipeline(stages)
