"""The autoencoders of a latent cascade, which are loaded while pictures become latents or latents pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.loading import open_network
from ..config import InputError, named
from ..embeddings.contract import weights_digest
from ..models.precision import autocast, for_inference

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
