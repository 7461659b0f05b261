"""A CLIP of ours: a checkpoint of ``train_classifier.py``, trained on clean or on noised images."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..checkpoints.loading import open_network
from ..config import entries, to_dict
from ..errors import InputError
from ..models.noised_clip import NoisedClip, NoisedClipConfig
from ..text.tokenizer import Tokenizer
from .contract import Clip, weights_digest


class DiffDalleClip(Clip):
    """Pictures are seen at t = 0: as good as clean ones for a network that was trained on noised images too."""

    def image_features(self, images: Tensor) -> Tensor:
        t = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        return cast("NoisedClip", self.network).encode_image(images, t)

    def text_features(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return cast("NoisedClip", self.network).encode_tokens(tokens, mask)

    @property
    def tokenizer(self) -> Tokenizer:
        return cast(Tokenizer, self.tokenize)

    def token_table(self) -> tuple[nn.Module, str]:
        return cast("NoisedClip", self.network).text_tower, "token_emb"


def load_diff_dalle_clip(model: str, device: torch.device, precision: str, outputs: str = "unit") -> DiffDalleClip:
    """model: a model or EMA checkpoint. Raises InputError as ``open_network`` does, and for other outputs than unit."""
    if outputs != "unit":
        raise InputError(f"the outputs of the CLIP {model} are {outputs!r}, but those of a CLIP of ours must be 'unit'")
    saved = open_network(model, "classifier")
    assert saved.tokenizer is not None  # classifiers always read text
    network, config = saved.load(device), saved.settings.model
    defaults = to_dict(NoisedClipConfig())  # left out, so that a setting of a later version changes no identity
    changed = {
        name: value
        for name, free, value in entries(NoisedClipConfig, to_dict(config))
        if not free and value != defaults[name]
    }
    identity = weights_digest(network.state_dict(), f"{saved.tokenizer.identity} {sorted(changed.items())}")
    return DiffDalleClip(
        network,
        f"diff_dalle {model}",
        f"diff_dalle:{identity}",
        config.image_size,
        saved.tokenizer,
        config.text_length,
        precision,
    )
