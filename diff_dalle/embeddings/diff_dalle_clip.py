"""A CLIP of ours: a checkpoint of ``train_classifier.py``, trained on clean or on noised images."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..checkpoints.loading import open_network
from ..models.noised_clip import NoisedClip
from .contract import Clip, weights_digest


class DiffDalleClip(Clip):
    """Pictures are seen at t = 0: as good as clean ones for a network that was trained on noised images too."""

    def image_features(self, images: Tensor) -> Tensor:
        t = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        return cast("NoisedClip", self.network).encode_image(images, t)

    def text_features(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return cast("NoisedClip", self.network).encode_tokens(tokens, mask)


def load_diff_dalle_clip(model: str, device: torch.device, precision: str) -> DiffDalleClip:
    """model: a model or EMA checkpoint. Raises InputError as ``open_network`` does."""
    saved = open_network(model, "classifier")
    assert saved.tokenizer is not None  # classifiers always read text
    network, config = saved.load(device), saved.settings.model
    identity = f"diff_dalle:{weights_digest(network.state_dict(), saved.tokenizer.identity)}"
    name = f"diff_dalle {model}"
    return DiffDalleClip(network, name, identity, config.image_size, saved.tokenizer, config.text_length, precision)
