"""A trained noised CLIP: guides a generator's sampling, and scores pictures against captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..batch import Batch, Conditioning
from ..checkpoints.loading import open_network
from ..config import disagreements, option
from ..diffusion.diffusion_config import NoiseConfig, create_noise_process
from ..diffusion.guidance import GRADIENTS, ClassifierGuidance
from ..diffusion.resample import ContrastiveConfig
from ..distributed.devices import pick_device
from ..distributed.world import SINGLE, World
from ..errors import InputError
from ..evaluation.retrieval import RetrievalTable
from ..images.pixels import from_uint8
from ..models.noised_clip import NoisedClip
from ..randomness import Draw
from ..tasks.contrastive import ContrastiveTask
from ..text.tokenizer import Tokenizer
from ..training.loop import EVALUATION_SEED
from ..training.precision import autocast, resolve_precision


@dataclass(frozen=True)
class ClassifierConfig:
    """Classifier guidance"""

    classifier_path: str = option("", "checkpoint of a noised CLIP that guides the sampling; empty = none")
    classifier_scale: tuple[float, ...] = option(
        (), "strength of its guidance: 0 = off, 1 = what Bayes' rule asks for; several values are all tried; empty = 1 "
        "with a classifier")  # fmt: skip
    classifier_gradient: str = option("x_t", "what the classifier looks at: the noisy image, or the expected one, and "
                                             "through the generator (slower)", choices=GRADIENTS)  # fmt: skip

    def __post_init__(self):
        if self.classifier_scale and not self.classifier_path and set(self.classifier_scale) != {0.0}:
            raise InputError("classifier_scale is given, but there is no classifier: give its checkpoint with "
                             "--classifier_path")  # fmt: skip

    @property
    def scales(self) -> tuple[float, ...]:
        """The strengths to sample with, at least one; 0 where there is no classifier."""
        return tuple(dict.fromkeys(self.classifier_scale)) or ((1.0,) if self.classifier_path else (0.0,))

    def load(self, device: torch.device, precision: str = "auto", bpe_path: str = "") -> Classifier | None:
        """The classifier, or None when there is none to guide."""
        return load_classifier(self.classifier_path, device, precision, bpe_path) if self.classifier_path else None


class Classifier:
    """A noised CLIP with all that using it needs. Made by ``load_classifier``.

    model, diffusion, tokenizer: the network, the process whose noise it knows, and its tokenizer.
    noised:                      whether it was trained on noisy images, else it only judges clean ones.
    """

    def __init__(self, model: NoisedClip, diffusion: NoiseConfig, noised: bool, tokenizer: Tokenizer,
                 precision: str, step: int = 0):  # fmt: skip
        self.model, self.diffusion, self.noised, self.tokenizer = model, diffusion, noised, tokenizer
        self.precision, self.step = precision, step

    @property
    def device(self) -> torch.device:
        return self.model.scale_logit.device

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """[N, D] float32 of length 1."""
        tokens, mask = self.tokenizer(list(prompts), self.model.config.text_length)
        with autocast(self.precision, self.device):
            return self.model.encode_text(tokens.to(self.device), mask.to(self.device))

    @torch.no_grad()
    def encode_image(self, images: np.ndarray, batch_size: int = 64) -> Tensor:
        """Clean pictures, uint8 [N, H, W, 3] → [N, D] float32 of length 1."""
        parts = []
        for piece in from_uint8(images).split(batch_size):
            t = torch.zeros(len(piece), dtype=torch.int64, device=self.device)
            with autocast(self.precision, self.device):
                parts.append(self.model.encode_image(piece.to(self.device), t))
        return torch.cat(parts)

    def guidance(self, prompts: Sequence[str], scale: float, gradient: str = "x_t") -> ClassifierGuidance:
        """Guidance of N images towards N prompts, whose text is encoded here, once. InputError for an ordinary CLIP
        that is to look at noisy images."""
        if gradient == "x_t" and not self.noised:
            raise InputError("the classifier was trained with --noised False, so it cannot judge noisy images: set "
                             "classifier_gradient to x_start")  # fmt: skip
        text = self.encode_text(prompts)
        text = text * self.model.scale

        def similarity(x: Tensor, t: Tensor) -> Tensor:
            with autocast(self.precision, self.device):
                return (self.model.encode_image(x, t) * text).sum(1)

        return ClassifierGuidance(similarity, scale, gradient)

    def retrieval(self, images: np.ndarray, prompts: Sequence[str], block: int = 64) -> RetrievalTable:
        """How often pictures, uint8 [N, H, W, 3], and their captions find each other at each level of noise, among
        ``block`` (fewer if there are fewer; an incomplete last block is left out). InputError for fewer than 2."""
        if len(images) < 2:
            raise InputError("retrieval needs at least 2 pictures: with one there is nothing to choose from")
        block = min(block, len(images))
        task = ContrastiveTask(self.model, create_noise_process(self.diffusion),
                               ContrastiveConfig(noised=self.noised), World(SINGLE, self.device))  # fmt: skip
        tokens, mask = self.tokenizer(list(prompts), self.model.config.text_length)
        whole = Batch(from_uint8(images), Conditioning(tokens=tokens, mask=mask), torch.arange(len(images)))
        found = []
        with torch.no_grad(), autocast(self.precision, self.device):
            blocks = [piece for piece in whole.split(block) if len(piece) == block]
            for piece in tqdm(blocks, desc="Retrieval", unit="block", disable=None):
                draw = Draw(EVALUATION_SEED, piece.index, self.device)
                found.append(task.held_out(piece.to(self.device), draw))
        means = {name: float(torch.cat([values[name] for values in found]).mean()) for name in found[0]}
        return RetrievalTable.from_values(means, task.levels, block)

    def check(self, expected) -> None:
        """InputError when settings asked for (see ``config.expectations``) are not the checkpoint's."""
        wrong = disagreements(expected, self.model.config)
        if wrong:
            raise InputError(f"the classifier has other settings: {', '.join(wrong)}; leave these flags out")

    def check_fits(self, image_size: tuple[int, int], diffusion: NoiseConfig, tokenizer: Tokenizer | None) -> None:
        """InputError unless this classifier can guide a generator: it must know the size of its pictures, its noise,
        and its vocabulary (if the generator reads text)."""
        side = self.model.config.image_size
        if tuple(image_size) != (side, side):
            height, width = image_size
            raise InputError(f"the classifier was trained on pictures of {side}×{side} pixels and cannot guide ones of "
                             f"{width}×{height}: use a classifier of that image_size")  # fmt: skip
        if tokenizer is not None and tokenizer.identity != self.tokenizer.identity:
            raise InputError(f"the classifier's vocabulary is {self.tokenizer.identity}, the generator's "
                             f"{tokenizer.identity}: use two that were trained with the same bpe_path")  # fmt: skip
        for name in ("noise_schedule", "diffusion_steps", "rescale_timesteps"):
            own, other = getattr(self.diffusion, name), getattr(diffusion, name)
            if own != other:
                raise InputError(f"the classifier was trained with {name} {own}, the generator with {other}: they "
                                 "would mean different noise by the same timestep")  # fmt: skip


def load_classifier(path: str, device: str = "auto", precision: str = "auto", bpe_path: str = "") -> Classifier:
    """A classifier ready to use, from a checkpoint alone; arguments as for ``pipeline.load``, errors too."""
    saved, place = open_network(path, "classifier", bpe_path), pick_device(device)
    settings = saved.settings
    return Classifier(saved.load(place), settings.diffusion, settings.contrastive.noised, saved.tokenizer,
                      resolve_precision(precision, place), saved.step)  # fmt: skip
