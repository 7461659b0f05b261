"""What guides a generator's sampling: a trained noised CLIP, which also scores images against captions, or a classifier
of classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..batch import Batch, Conditioning
from ..checkpoints.loading import SavedNetwork, open_networks
from ..config import Fault, InputError, disagreements, named, option, settings, values_by_name
from ..diffusion.diffusion_config import NoiseConfig, create_noise_process
from ..diffusion.gaussian_diffusion import SpacedDiffusion
from ..diffusion.guidance import FORMS, GRADIENTS, ClassifierGuidance
from ..diffusion.resample import ContrastiveConfig
from ..distributed.devices import use_device
from ..distributed.world import SINGLE, World
from ..evaluation.retrieval import CANDIDATES, RetrievalTable
from ..images.signal import Signal
from ..models.noised_clip import NoisedClipConfig, NoisyClassifierConfig, classifier_flag
from ..models.options import PRECISIONS
from ..models.precision import autocast, for_inference, resolve_precision
from ..randomness import Draw
from ..tasks.contrastive import ContrastiveTask
from ..text.tokenizer import Tokenizer
from ..training.loop import EVALUATION_SEED
from .lora import GUIDES, Loras, of_guides


@settings
class ClassifierConfig:
    """Classifier guidance"""

    classifier_path: str = option(
        "", "checkpoint of a noised CLIP, or of a classifier of noisy images; empty = no classifier guidance"
    )
    classifier_scale: tuple[float, ...] = option(
        (),
        "scale of classifier guidance; 0 = off, 1 = Bayes' rule; with several values, sample with each; none = 1 with "
        "a classifier",
    )
    classifier_gradient: str = option(
        "x_t",
        "input of the classifier: the noisy image, or the predicted one, backpropagated through the generator (slower)",
        choices=GRADIENTS,
        needs=("classifier_path",),
    )
    classifier_form: str | None = option(
        None,
        "what the classifier shifts: the mean of an ancestral sampling step, as published, or the score, with any "
        "sampler; none = mean with ancestral, else score",
        choices=FORMS,
        needs=("classifier_path",),
    )

    classifier_precision: str | None = option(
        None,
        "floating-point precision of the classifier; none = as the generator's",
        choices=PRECISIONS,
        needs=("classifier_path",),
    )

    def faults(self) -> Iterator[Fault]:
        if any(self.classifier_scale) and not self.classifier_path:
            rule = f"is set, but there is no classifier: give its checkpoint with {named('classifier_path')}"
            yield Fault("classifier_scale", rule)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales to sample with, at least one; 0 without a classifier."""
        return tuple(dict.fromkeys(self.classifier_scale)) or ((1.0,) if self.classifier_path else (0.0,))

    def load(
        self,
        device: torch.device,
        precision: str = "auto",
        bpe_path: str = "",
        lora: Sequence[str] = (),
        accept_changed_base: bool = False,
    ) -> Guide | None:
        """The classifier, with those of the LoRAs that are for classifiers; None without ``classifier_path``."""
        own, _ = of_guides(lora)
        if self.classifier_path:
            loras, own_precision = Loras.read(own, accept_changed_base), self.classifier_precision or precision
            return load_guide(self.classifier_path, device, own_precision, bpe_path, loras)
        check_guided(own)
        return None


class Guide(ABC):
    """A classifier from its checkpoint, which loads its weights at first use. Made by ``load_classifier``.

    precision: fp32, bf16 or fp16; the model's weights are converted to it for use under autocast.

    Its attribute ``diffusion`` is the process whose noise it was trained on; ``noised`` is False if it was trained on
    clean images only; ``step`` counts its training steps; ``reads`` says whether it guides by prompts or by labels.
    """

    reads: str
    noised = True
    tokenizer: Tokenizer | None = None

    def __init__(self, saved: SavedNetwork, device: torch.device, precision: str = "fp32"):
        self.saved, self.device, self.precision, self.step = saved, device, precision, saved.step
        self.config = saved.settings.model
        self.diffusion: NoiseConfig = saved.settings.diffusion
        self.signal: Signal = saved.settings.signal

    @property
    def image_size(self) -> int:
        """Width and height in pixels of the images it takes."""
        return self.config.image_size

    @cached_property
    def model(self) -> Any:
        """The network."""
        return for_inference(self.saved.load(self.device), self.precision)

    @cached_property
    def process(self) -> SpacedDiffusion:
        """The noise of its training."""
        return create_noise_process(self.diffusion)

    @abstractmethod
    def guide(
        self, prompts: Sequence[str], labels: Sequence[int] | None, scale: float, gradient: str
    ) -> ClassifierGuidance:
        """Guidance of N images by N prompts or labels, whichever it reads. Raises InputError as ``check_gradient`` and
        ``check_labels``."""

    def check_labels(self, labels: Sequence[int] | None) -> None:  # noqa: B027  (optional)
        """InputError for labels that it cannot guide by."""

    @property
    def classes(self) -> int:
        """Number of classes that it guides by; 0 = it guides by prompts."""
        return 0

    @property
    def said(self) -> dict[str, Any]:
        """The settings of its network by the names of a classifier's flags."""
        return {**values_by_name(self.config), "classifier_pool": "attention"}

    def check(self, expected) -> None:
        """InputError if expected settings (see ``config.expectations``) differ from the checkpoint's."""
        if wrong := disagreements(expected, self.said):
            raise InputError(f"the classifier has other settings: {', '.join(wrong)}; leave these flags out")

    def check_gradient(self, gradient: str) -> None:
        """InputError for the gradient at noisy images of a classifier trained on clean ones."""
        if gradient == "x_t" and not self.noised:
            raise InputError(
                f"the classifier was trained with {named('noised')} False, so it cannot score noisy images: set "
                f"{named('classifier_gradient')} to x_start"
            )

    def check_fits(self, image_size: tuple[int, int], signal: Signal, tokenizer: Tokenizer | None) -> None:
        """InputError unless this classifier can guide a generator with this image size, signal, and vocabulary (None =
        a generator without text)."""
        size = self.image_size
        if tuple(image_size) != (size, size):
            height, width = image_size
            raise InputError(
                f"the classifier was trained on {size}×{size} images and cannot guide {width}×{height} images: use a "
                "classifier of that image_size"
            )
        if signal.channels != self.signal.channels:
            raise InputError(
                f"the classifier was trained on images with {self.signal.channels} channels, but the generator's have "
                f"{signal.channels}: leave the classifier out"
            )
        own_tokenizer = self.tokenizer
        if tokenizer and own_tokenizer and tokenizer.base_identity != own_tokenizer.base_identity:
            raise InputError(
                f"the classifier's vocabulary is {own_tokenizer.identity}, the generator's {tokenizer.identity}: use "
                "a classifier and a generator trained with the same bpe_path"
            )

    def has_noise_of(self, diffusion: NoiseConfig) -> bool:
        """Whether a generator with this process was trained on the same noise, and told of it in the same way."""
        return all(getattr(self.diffusion, each.name) == getattr(diffusion, each.name) for each in fields(NoiseConfig))


class Classifier(Guide):
    """A noised CLIP: guides by prompts, and scores images against captions."""

    reads = "prompts"
    config: NoisedClipConfig
    tokenizer: Tokenizer

    def __init__(self, saved: SavedNetwork, device: torch.device, precision: str = "fp32"):
        super().__init__(saved, device, precision)
        assert saved.tokenizer is not None  # it always reads text
        self.tokenizer, self.noised = saved.tokenizer, saved.settings.contrastive.noised

    @torch.no_grad()
    def encode_text(self, prompts: Sequence[str]) -> Tensor:
        """[N, D] float32, unit norm."""
        tokens, mask = self.tokenizer(list(prompts), self.config.text_length)
        with autocast(self.precision, self.device):
            return self.model.encode_text(tokens.to(self.device), mask.to(self.device))

    @torch.no_grad()
    def encode_image(self, images: np.ndarray, batch_size: int = 64) -> Tensor:
        """Clean images, uint8 [N, H, W, 3] → [N, D] float32, unit norm."""
        parts = []
        for part in self.signal.from_pixels(images).split(batch_size):
            t = torch.zeros(len(part), dtype=torch.int64, device=self.device)
            with autocast(self.precision, self.device):
                parts.append(self.model.encode_image(part.to(self.device), t))
        return torch.cat(parts)

    def guide(
        self, prompts: Sequence[str], labels: Sequence[int] | None, scale: float, gradient: str
    ) -> ClassifierGuidance:
        """By the prompts, which are encoded here, once."""
        self.check_gradient(gradient)
        text = self.encode_text(prompts) * self.model.scale

        def similarity(x: Tensor, t: Tensor) -> Tensor:
            with autocast(self.precision, self.device):
                return (self.model.encode_image(x, t) * text).sum(1)

        return ClassifierGuidance(similarity, scale, gradient)

    def retrieval(self, images: np.ndarray, prompts: Sequence[str], block: int = CANDIDATES) -> RetrievalTable:
        """Retrieval accuracy of images, uint8 [N, H, W, 3], and their captions at each noise level, among ``block``
        candidates (all if fewer; an incomplete last block is discarded). InputError for fewer than 2 images."""
        if len(images) < 2:
            raise InputError("retrieval requires at least 2 images, because with one there is nothing to choose from")
        block = min(block, len(images))
        task = ContrastiveTask(
            self.model,
            self.process,
            ContrastiveConfig(noised=self.noised),
            World(SINGLE, self.device),
        )
        tokens, mask = self.tokenizer(list(prompts), self.config.text_length)
        batch = Batch(
            self.signal.from_pixels(images), Conditioning(tokens=tokens, mask=mask), torch.arange(len(images))
        )
        results = []
        with torch.no_grad(), autocast(self.precision, self.device):
            blocks = [part for part in batch.split(block) if len(part) == block]
            for part in tqdm(blocks, desc="Retrieval", unit="block", disable=None):
                draw = Draw(EVALUATION_SEED, part.index, self.device)
                results.append(task.held_out(part.to(self.device), draw))
        means = {name: float(torch.cat([values[name] for values in results]).mean()) for name in results[0]}
        return RetrievalTable.from_values(means, task.levels, block)


class VitClassifier(Classifier):
    """GLIDE's noised CLIP, which has another vocabulary than the generators that it guides."""

    def check_fits(self, image_size: tuple[int, int], signal: Signal, tokenizer: Tokenizer | None) -> None:
        super().check_fits(image_size, signal, None)


CLIPS: dict[str, type[Classifier]] = {"classifier": Classifier, "vit_clip": VitClassifier}  # by kind


class LabelClassifier(Guide):
    """A classifier of noisy images into classes (Dhariwal & Nichol 2021, §4): guides by labels."""

    reads = "labels"
    config: NoisyClassifierConfig

    @property
    def image_size(self) -> int:
        return self.config.tower.image_size

    @property
    def classes(self) -> int:
        return self.config.classes

    @property
    def said(self) -> dict[str, Any]:
        tower = {classifier_flag(name): value for name, value in values_by_name(self.config.tower).items()}
        return {**tower, "classifier_pool": self.config.pool}

    def check_labels(self, labels: Sequence[int] | None) -> None:
        last = self.config.classes - 1
        if labels is None:
            raise InputError(f"the classifier tells classes apart: give labels from 0 to {last}")
        if not all(0 <= label <= last for label in labels):
            raise InputError(f"labels must lie between 0 and {last}, the classifier's classes, not {list(labels)}")

    def guide(
        self, prompts: Sequence[str], labels: Sequence[int] | None, scale: float, gradient: str
    ) -> ClassifierGuidance:
        self.check_labels(labels)
        chosen = torch.tensor(labels, device=self.device)

        def log_probability(x: Tensor, t: Tensor) -> Tensor:
            with autocast(self.precision, self.device):
                logits = self.model(x, t)
            return logits.float().log_softmax(1).gather(1, chosen[:, None]).squeeze(1)

        return ClassifierGuidance(log_probability, scale, gradient)


def load_classifier(
    path: str,
    device: str | torch.device = "auto",
    precision: str = "auto",
    bpe_path: str = "",
    *,
    lora: str | Sequence[str] = (),
    accept_changed_base: bool = False,
) -> Classifier:
    """A noised CLIP from its checkpoint; arguments and errors as for ``pipeline.load``."""
    loras = Loras.read([lora] if isinstance(lora, str) else lora, accept_changed_base)
    guide = load_guide(path, device, precision, bpe_path, loras, tuple(CLIPS))
    assert isinstance(guide, Classifier)
    return guide


def load_guide(
    path: str,
    device: str | torch.device = "auto",
    precision: str = "auto",
    bpe_path: str = "",
    loras: Loras = Loras(),  # noqa: B008  (immutable)
    kinds: Sequence[str] = GUIDES,
) -> Guide:
    """A noised CLIP, or a classifier of classes, from its checkpoint, with LoRAs; kinds: of networks that it may be.
    Other arguments and errors as for ``pipeline.load``."""
    (saved, *_), resolved = open_networks(path, kinds, bpe_path), use_device(device)
    made = CLIPS.get(saved.settings.name, LabelClassifier)
    return made(loras.given_to(saved), resolved, resolve_precision(precision, resolved))


def check_guided(loras: Sequence[str]) -> None:
    """InputError for LoRAs of classifiers where no classifier guides the sampling."""
    for path in loras:
        raise InputError(
            f"{path} was trained for a classifier, but none guides the sampling: give it with "
            f"{named('classifier_path')}, or leave the LoRA out"
        )
