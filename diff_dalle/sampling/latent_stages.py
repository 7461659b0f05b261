"""The stages of a latent cascade: C makes semantic latents from text, B makes latents of stage A from those; and the
autoencoders, which are loaded while pictures become latents or latents pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..checkpoints.cascade import TrainedWith
from ..checkpoints.loading import open_network
from ..config import InputError, named
from ..diffusion.augmentation import Degradation
from ..diffusion.log_snr import LogSnrProcess
from ..diffusion.process import Process
from ..diffusion.tiling import Tiled
from ..embeddings.contract import weights_digest
from ..images.signal import LatentSignal, from_uint8
from ..models.latent.config import LatentUnetConfig
from ..models.latent.stages import StageBConfig, StageCConfig
from ..models.precision import autocast, for_inference
from .clips import LatentClips, check_width
from .request import Request
from .stage import Stage, StageJob
from .stage_settings import STAGE_B, StageSettings

PIXELS = 2**20  # of the pictures that are encoded or decoded at once


class Autoencoder:
    """Stage A, or a semantic encoder with its previewer, from its checkpoint.

    kind:      "stage_a" or "semantic".
    precision: fp32, bf16 or fp16.
    keep:      keep the weights in memory; False = until ``release``.

    Raises InputError for a checkpoint of anything else.
    """

    def __init__(self, path: str, kind: str, device: torch.device, precision: str = "fp32", keep: bool = True):
        self.saved, self.device, self.precision, self.keep = open_network(path, kind), device, precision, keep
        config: Any = self.saved.settings.model
        self.path, self.kind, self.stride = path, kind, config.stride
        self.channels: int = config.latent_channels if kind == "stage_a" else config.semantic_channels
        self._network: Any = None

    @cached_property
    def identity(self) -> str:
        """Of its weights, as checkpoints of stages B and C record it."""
        return weights_digest(self.saved.weights())

    def check(self, channels: int, stride: int, identity: str, path: str) -> None:
        """InputError unless its latents are those that the stage at ``path`` was trained with.

        identity: what that checkpoint says; empty = nothing.
        """
        remedy = f"give the {named(self.kind)} of its training"
        if (self.channels, self.stride) != (channels, stride):
            raise InputError(
                f"{self.path} has latents of {self.channels} channels with {self.stride} pixels per position, but "
                f"{path} was trained with {channels} channels and {stride} pixels: {remedy}"
            )
        if identity and identity != self.identity:
            raise InputError(
                f"{self.path} has the weights {self.identity}, but {path} was trained with {identity}: {remedy}"
            )

    def encode(self, images: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] → [N, channels, H / stride, W / stride] float32 on the CPU."""
        return self._in_batches(self._loaded().encode, images, 1)

    def decode(self, latents: Tensor) -> Tensor:
        """[N, channels, h, w] → [N, 3, H, W] float32 on the CPU: pictures, or smaller previews."""
        network = self._loaded()
        return self._in_batches(network.decode if self.kind == "stage_a" else network.preview, latents, self.stride)

    def release(self) -> None:
        """Free the weights, unless they are kept."""
        if not self.keep and self._network is not None:
            self._network = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # for the next stage

    def _loaded(self) -> Any:
        if self._network is None:
            self._network = for_inference(self.saved.load(self.device), self.precision)
        return self._network

    @torch.no_grad()
    def _in_batches(self, function: Callable[[Tensor], Tensor], x: Tensor, scale: int) -> Tensor:
        """scale: pixels per position of x."""
        count = max(1, PIXELS // (x.shape[2] * x.shape[3] * scale**2))
        with autocast(self.precision, self.device):
            return torch.cat([function(part.to(self.device)).float().cpu() for part in x.split(count)])


class LatentStage(Stage):
    """A network that makes latents by a process in log-SNR. Arguments as for ``Stage``. ``attach`` comes before
    sampling."""

    config: LatentUnetConfig
    signal: LatentSignal
    has_no: tuple[str, ...] = ("noise_level", "blur_level", "tile_size")
    decoder = ""  # what its latents become pictures by: the flag that names the file
    decodes_apart = True

    def configure(self, settings: Any) -> None:
        self.config = self.unet = settings.model
        self.trained_with: TrainedWith = settings.trained_with
        self.diffusion, self.degradation, self.small_size = settings.diffusion, Degradation(), 0
        self.image_size = self.trained_with.image_size // self.signal.scale
        sampling = settings.sampling
        self.defaults = StageSettings(sampling.sampler_config, sampling.guidance, batch_size=4, shift=sampling.shift)
        self.clips = LatentClips(None)
        self.autoencoders: tuple[Autoencoder, ...] = ()

    def attach(self, clips: LatentClips, stage_a: Autoencoder | None, semantic: Autoencoder | None) -> None:
        """Work with these. Raises InputError for those that it was not trained with.

        stage_a:  decodes what stage B makes; None = there is none.
        semantic: encodes pictures for stages C and B, and previews what stage C makes; None = there is none.
        """
        self.clips = clips

    def _attached(self, signal: LatentSignal, found: Autoencoder | None, identity: str) -> LatentSignal:
        """A signal with the autoencoder that it was trained with, as far as ``identity`` says; None = there is none."""
        if found is None:
            return signal
        found.check(signal.channels, signal.scale, identity, self.path)
        self.autoencoders = (*self.autoencoders, found)
        return replace(signal, encode=found.encode, decode=found.decode)

    # ------------------------------------------------------------------------------------------------------ conditions

    @property
    def reads_text(self) -> bool:
        return self.tokenizer is not None or self._text_from_outside

    @property
    def reads_clip(self) -> bool:
        """Whether it is conditioned on what a CLIP makes of prompts or pictures."""
        return self._text_from_outside or self.takes_embeddings

    @property
    def _text_from_outside(self) -> bool:
        """Whether a CLIP encodes its prompts."""
        return self.tokenizer is None and bool(self.config.states_width or self.config.vector_width)

    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """Prompts, as they are in training."""
        if self._text_from_outside:  # all at once
            self.clips.texts(self.trained_with.text_clip, self, [*request.prompts, request.negative_prompt])
        return self.text([request.prompts[i] for i in index])

    def text(self, prompts: Sequence[str]) -> Conditioning:
        """By its own text encoder, or by the CLIP of its training."""
        if not self._text_from_outside:
            return super().text(prompts)
        config = self.config
        known = self.clips.texts(self.trained_with.text_clip, self, prompts)
        pooled, states, mask = (torch.stack(each) for each in zip(*(known[text] for text in prompts), strict=True))
        check_width("model.pooled_width", config.vector_width, pooled.shape[1], self.path)
        check_width("model.text_width", config.states_width, states.shape[2], self.path)
        cond = Conditioning(text_pooled=pooled if config.vector_width else None)
        return replace(cond, text_states=states, mask=mask) if config.states_width else cond

    def negative_conditioning(self, cond: Conditioning, negative_prompt: str) -> Conditioning | None:
        """The negative prompt, or an empty one; zeros for image embedding and semantic latents."""
        if not cond.droppable:
            return None
        count = len(next(iter(cond.present().values())))
        everywhere = torch.ones(count, dtype=torch.bool)
        null, text = cond.drop_embedding(everywhere).drop_semantic(everywhere), self.text([negative_prompt] * count)
        return replace(
            null, tokens=text.tokens, mask=text.mask, text_states=text.text_states, text_pooled=text.text_pooled
        )

    # -------------------------------------------------------------------------------------------------------- sampling

    @cached_property
    def _process(self) -> LogSnrProcess:
        return LogSnrProcess(self.diffusion)

    def process(self, settings: StageSettings) -> Process:
        shift, start, end = settings.shift, settings.t_start, settings.t_end
        return settings.sampler.steps_of(self._process, shift=shift, t_start=start, t_end=end)

    def classifier(self, settings: StageSettings) -> None:
        if settings.classifier is not None and settings.classifier_scale:
            raise InputError("a classifier sees pictures, not the latents of a latent cascade: leave it out")

    # -------------------------------------------------------------------------------------------------------- pictures

    def pixels(self, x: Tensor) -> np.ndarray:
        """Pictures, or without a network that decodes them empty ones."""
        if self.signal.decode is None:
            return np.zeros((len(x), 0, 0, 3), dtype=np.uint8)
        return self.signal.to_pixels(x)

    def picture_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return (0, 0) if self.signal.decode is None else super().picture_size(size)

    def check_last(self) -> None:
        if self.signal.decode is None:
            raise InputError(
                f"{self.path} makes latents, which become pictures by {self.signal.autoencoder}, but there is none: "
                f"give its checkpoint with {self.decoder}"
            )

    def release(self) -> None:
        for autoencoder in self.autoencoders:
            autoencoder.release()


class SemanticStage(LatentStage):
    """Stage C: semantic latents from a prompt, or from a picture's embedding by a CLIP."""

    config: StageCConfig
    decoder = f"{named('semantic')}, or stages B and A with {named('stage_b')} and {named('stage_a')}"

    def configure(self, settings: Any) -> None:
        super().configure(settings)
        self.takes_embeddings = self.config.embedding_width > 0

    def attach(self, clips: LatentClips, stage_a: Autoencoder | None, semantic: Autoencoder | None) -> None:
        super().attach(clips, stage_a, semantic)
        self.signal = self._attached(self.signal, semantic, self.trained_with.semantic)

    def conditioning(self, request: Request, index: Sequence[int]) -> Conditioning:
        """Prompts and image embeddings, zeros without pictures."""
        cond, width = super().conditioning(request, index), self.config.embedding_width
        if not width:
            return cond
        found = np.zeros((len(request), width), dtype=np.float32) if request.embeddings is None else request.embeddings
        if request.images is not None:
            found = self.clips.pictures(self.trained_with.image_clip, self, request.images, len(request))
        check_width("model.image_width", width, found.shape[1], self.path)
        return replace(cond, image_embedding=torch.from_numpy(found[list(index)]))


class ReconstructionStage(LatentStage):
    """Stage B: latents of stage A from semantic ones, which stage C makes or the semantic encoder of a picture."""

    config: StageBConfig
    decoder = named("stage_a")
    has_no = ("noise_level", "blur_level")
    is_upsampler = True
    flags = STAGE_B
    reconstructs = True

    def attach(self, clips: LatentClips, stage_a: Autoencoder | None, semantic: Autoencoder | None) -> None:
        super().attach(clips, stage_a, semantic)
        known = self.trained_with
        self.signal = self._attached(self.signal, stage_a, known.stage_a)
        #: How pictures become the semantic latents that it reads.
        self.read = LatentSignal(self.config.semantic_channels, known.semantic_stride, "a semantic encoder")
        self.read = self._attached(self.read, semantic, known.semantic)

    @property
    def tile_divisor(self) -> int:
        """In pixels."""
        return self.signal.scale * self.divisor

    def tiled(self, network: nn.Module, settings: StageSettings) -> nn.Module:
        """Tiles are given in pixels."""
        tile, overlap = (length // self.signal.scale for length in (settings.tile_size, settings.tile_overlap))
        return Tiled(network, tile, overlap, self.divisor, self.config.patch_size)

    def check_after(self, before: Stage) -> None:
        if not isinstance(before, SemanticStage):
            raise InputError(f"{self.path} is a stage B, which continues from a stage C, but {before.path} is none")
        own, given = self.trained_with.semantic, before.trained_with.semantic
        if own and given and own != given:
            raise InputError(
                f"{before.path} was trained with the semantic encoder {given}, but {self.path} with {own}: give stages "
                "that were trained with the same"
            )
        channels = before.signal.channels
        if channels != self.config.semantic_channels:
            raise InputError(
                f"{before.path} makes semantic latents of {channels} channels, but {self.path} reads "
                f"{self.config.semantic_channels}: give stages that were trained with the same semantic encoder"
            )

    def size_before(self, size: tuple[int, int], before: Stage) -> tuple[int, int]:
        """As many positions for a picture as both stages had in training, rounded up."""
        unit = before.divisor * self.image_size
        height, width = (before.divisor * -(-length * before.image_size // unit) for length in size)
        return height, width

    def divisor_after(self, divisor: int) -> int:
        """Its own: semantic latents are resized."""
        return self.divisor

    def from_low_res(self, images: np.ndarray) -> Tensor:
        """Semantic latents of pictures, resized by ``sampling.semantic_scale`` to the next multiple of the encoder's
        stride."""
        if self.read.encode is None:
            raise InputError(
                f"{self.path} reads the semantic latents of pictures, but there is no semantic encoder: give its "
                f"checkpoint with {named('semantic')}"
            )
        stride, scale, parts = self.read.scale, self.saved.settings.sampling.semantic_scale, []
        size = [stride * math.ceil(length * scale / stride) for length in images.shape[1:3]]
        for image in images:  # one at a time to save memory
            pixels = from_uint8(image[None])
            if list(pixels.shape[2:]) != size:
                pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
            parts.append(self.read.encode(pixels))
        self.release()
        return torch.cat(parts)

    def guidable(self, cond: Conditioning) -> bool:
        """The semantic latents can be left out."""
        return True

    def continued(self, cond: Conditioning, low_res: Tensor, seeds: Sequence[int], job: StageJob) -> Conditioning:
        """``cond`` with the semantic latents."""
        return replace(cond, semantic=low_res)
