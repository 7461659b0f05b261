"""Checkpoints and prompts → images: what library users, ``sample.py`` and the evaluation call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm

from .batch import Conditioning
from .classifier import Classifier
from .config import disagreements, from_dict
from .diffusion.diffusion_config import DiffusionConfig
from .diffusion.guidance import GuidanceConfig
from .diffusion.sampling import SamplerConfig, sample_images
from .distributed import SINGLE, World, pick_device
from .errors import InputError
from .loading import read_checkpoint, restore
from .models.generator import Generator, GeneratorConfig
from .tasks.generator_run import GeneratorRun
from .text.tokenizer import Tokenizer
from .training.precision import autocast, resolve_precision


class Pipeline:
    """A generator with all that sampling needs. Made by ``load``.

    model, diffusion, tokenizer: the network, the settings of its process, and its tokenizer (None without text).
    step, samples:               how long it was trained.
    """

    def __init__(self, model: Generator, diffusion: DiffusionConfig, tokenizer: Tokenizer | None, precision: str,
                 step: int = 0, samples: int = 0):  # fmt: skip
        self.model, self.diffusion, self.tokenizer = model, diffusion, tokenizer
        self.precision, self.step, self.samples = precision, step, samples

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def image_size(self) -> int:
        """Side in pixels of the pictures the generator was trained on."""
        return self.model.config.unet.image_size

    def conditioning(self, prompts: Sequence[str], labels: Sequence[int] | None = None) -> Conditioning:
        """Prompts and classes as the network takes them, on the CPU. InputError for missing or useless ones."""
        classes = self.model.config.unet.num_classes
        tokens = mask = None
        if self.tokenizer is not None:
            tokens, mask = self.tokenizer(list(prompts), self.model.config.text.text_length)
        elif any(prompts):
            raise InputError("prompts are given, but this generator does not read text: leave them empty")
        if classes and labels is None:
            raise InputError(f"this generator is conditioned on classes: give labels from 0 to {classes - 1}")
        if labels is not None and not classes:
            raise InputError("labels are given, but this generator is not conditioned on classes")
        if labels is not None and not all(0 <= label <= classes for label in labels):
            raise InputError(f"labels must lie between 0 and {classes - 1} ({classes} = no class), not {list(labels)}")
        return Conditioning(tokens=tokens, mask=mask, labels=torch.tensor(list(labels)) if classes else None)

    def sample(
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
        classifier: Classifier | None = None,
        classifier_prompts: Sequence[str] | None = None,
        classifier_scale: float = 1.0,
        classifier_gradient: str = "x_t",
        progress: bool = True,
        world: World | None = None,
    ) -> np.ndarray:
        """Pictures, one a prompt: uint8 [N, height, width, 3].

        seed:            picture i has seed + i, and depends on that alone: not on the batch or the other prompts.
        seeds:           the pictures' own seeds, instead.
        labels:          classes, one a prompt, for a class-conditional generator.
        negative_prompt: what guidance leads away from; empty = no caption.
        size:            height and width; None = as trained. Anything that the network divides.
        batch_size:      pictures at a time, per process; guidance doubles the memory that takes.
        classifier:      a noised CLIP (``load_classifier``) that guides too, with strength ``classifier_scale``,
                         towards ``classifier_prompts`` (None = the prompts); its gradient is taken at "x_t", or at the
                         expected "x_start" and through the generator.
        world:           the processes that share the work (``distributed.launch``); all get all pictures.

        Raises InputError for a size that the network does not divide, for missing or impossible labels, for prompts
        that nobody reads, and for a classifier that does not fit the generator.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        seeds = range(seed, seed + len(prompts)) if seeds is None else seeds
        steered = prompts if classifier_prompts is None else classifier_prompts
        if any(part is not None and len(part) != len(prompts) for part in (seeds, labels, steered)):
            raise InputError(f"{len(prompts)} prompts need as many seeds, labels and classifier_prompts")
        size = size or (self.image_size, self.image_size)
        self.model.config.unet.check_size(*size)
        world = world or World(SINGLE, self.device)
        if classifier is not None:
            classifier.check_fits(size, self.diffusion, self.tokenizer)
        unread = self.tokenizer is None and classifier is not None  # the generator's, that is
        cond = self.conditioning([""] * len(prompts) if unread else prompts, labels)
        null = self._null(cond, negative_prompt)
        sampler, guidance = sampler or SamplerConfig(), guidance or GuidanceConfig()

        mine = list(range(world.rank, len(prompts), world.size))
        images = np.empty((len(prompts), *size, 3), dtype=np.uint8)
        batches = [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
        bar = tqdm(total=len(prompts), unit="image", desc="Sampling", disable=not (progress and world.is_main))
        with bar, autocast(self.precision, self.device):
            for index in batches:
                guide = None
                if classifier is not None:
                    guide = classifier.guidance([steered[i] for i in index], classifier_scale, classifier_gradient)
                images[index] = sample_images(
                    self.model, self.diffusion, cond.select(index), null.select(index), size,
                    [seeds[i] for i in index], sampler, guidance, guide,
                )  # fmt: skip
                bar.update(min(len(index) * world.size, len(prompts) - bar.n))
        for rank, part in enumerate(world.gather(images[mine])):
            images[rank :: world.size] = part
        return images

    def _null(self, cond: Conditioning, negative_prompt: str) -> Conditioning:
        """What guidance leads away from: no caption and no class, or a negative prompt."""
        count = next((len(value) for value in cond.present().values()), 0)
        null = cond.drop(torch.ones(count, dtype=torch.bool), self.model.config.unet.num_classes)
        if not negative_prompt:
            return null
        if self.tokenizer is None:
            raise InputError(f"negative_prompt is {negative_prompt!r}, but this generator does not read text")
        labels = null.labels.tolist() if null.labels is not None else None
        return self.conditioning([negative_prompt] * count, labels)

    def check(self, expected) -> None:
        """InputError when settings asked for (see ``config.expectations``) are not the checkpoint's."""
        wrong = disagreements(expected, self.model.config) + disagreements(expected, self.diffusion)
        if wrong:
            raise InputError(f"the checkpoint has other settings: {', '.join(wrong)}; leave these flags out")


def load(path: str, device: str = "auto", precision: str = "auto", bpe_path: str = "") -> Pipeline:
    """A generator ready to sample, from a model or EMA checkpoint alone.

    path:      ``ema_….pt`` (better pictures) or ``model….pt``, local or remote.
    device:    auto, cpu, cuda, cuda:1, mps, …; auto takes CUDA, then MPS, then the CPU.
    precision: auto, fp32, bf16 or fp16.
    bpe_path:  where the tokenizer's vocabulary is now, if it was a file that has moved since training.

    Raises InputError for a file that is no generator's checkpoint, or whose tokenizer cannot be found.
    """
    content, tokenizer = read_checkpoint(path, GeneratorRun.kind, bpe_path)
    config = from_dict(GeneratorConfig, content["config"]["model"], "model")
    diffusion = from_dict(DiffusionConfig, content["config"]["diffusion"], "diffusion")
    place, vocab_size = pick_device(device), tokenizer.vocab_size if tokenizer else 0
    model = restore(lambda: Generator(config, vocab_size, diffusion.out_channels), content, path, place)
    precision = resolve_precision(precision, place)
    return Pipeline(model, diffusion, tokenizer, precision, content["step"], content["samples"])
