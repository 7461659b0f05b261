"""What conditions stages B and C besides the noise: tokens for attention, and maps that are added to the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import Conditioning
from ...config import InputError
from ..layers import Linear, Module, recompute
from ..norms import LayerNorm32
from .blocks import NORM_EPS, ChannelNorm
from .config import LatentUnetConfig

MAPPER_STD = 0.02  # of the initial weights of layers that map conditions, as in the released networks


def mapper(module: Module) -> Module:
    """Initialize a layer that maps a condition, and return it."""
    nn.init.normal_(module.weight, std=MAPPER_STD)  # type: ignore[arg-type]
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


class ConditionTokens(nn.Module):
    """Text states, pooled text and image embedding → condition tokens, in this order.

    There is no attention mask. So that a caption gives the same tokens whatever it is padded with, states where
    ``cond.states_mask`` is False count as 0, and all texts have ``text_length`` tokens.
    """

    def __init__(self, config: LatentUnetConfig):
        super().__init__()
        self.count, self.text_length, width = config.vector_tokens, config.text.text_length, config.cond_width
        states, pooled, image = config.states_width, config.vector_width, config.embedding_width
        self.text = mapper(Linear(states, width)) if states else None
        self.pooled = mapper(nn.Linear(pooled, self.count * width)) if pooled else None
        self.image = mapper(nn.Linear(image, self.count * width)) if image else None
        self.norm = LayerNorm32(width, NORM_EPS, elementwise_affine=False)

    def forward(self, cond: Conditioning, images: int) -> Tensor:
        """[N, S, cond_width]; images: N. Raises InputError for missing conditions and those of another width. An image
        embedding that is not given is 0, as one that is dropped."""
        parts = []
        if self.text is not None:
            parts.append(self.text(self._states(cond, self.text.in_features)))
        if self.pooled is not None:
            if cond.text_pooled is None:
                raise InputError("the network expects pooled text (pooled_width), but cond has no text_pooled")
            parts.append(self._tokens(self.pooled, cond.text_pooled, "pooled text", "pooled_width"))
        if self.image is not None:
            embedding = cond.image_embedding
            if embedding is None:
                embedding = torch.zeros(images, self.image.in_features, device=self.image.weight.device)
            parts.append(self._tokens(self.image, embedding, "image embedding", "image_width"))
        return self.norm(torch.cat(parts, 1))

    def _states(self, cond: Conditioning, width: int) -> Tensor:
        states = cond.text_states
        if states is None:
            raise InputError("the network expects text states (text_width), but cond has no text_states")
        if states.shape[2] != width:
            raise InputError(f"the text states have width {states.shape[2]}, but text_width is {width}")
        if states.shape[1] > self.text_length:
            raise InputError(f"the texts have {states.shape[1]} tokens, but text_length is {self.text_length}")
        if cond.states_mask is not None:
            states = states.masked_fill(~cond.states_mask[:, :, None], 0.0)
        return F.pad(states, (0, 0, 0, self.text_length - states.shape[1]))

    def _tokens(self, layer: nn.Linear, vectors: Tensor, what: str, setting: str) -> Tensor:
        """[N, D] or [N, 1, D] → [N, count, cond_width]."""
        flat = vectors.flatten(1)
        if flat.shape[1] != layer.in_features:
            raise InputError(
                f"the {what} has the shape {tuple(vectors.shape)}, but {setting} is {layer.in_features}: give one "
                "vector of this width for each image"
            )
        return layer(flat).unflatten(1, (self.count, -1))


class MapCondition(nn.Module):
    """A map of conditions → a feature map, to be added to the input layer's. Samples without it give zeros."""

    def __init__(self, channels: int, width: int, use_checkpoint: bool):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.layer_in, self.layer_out = (
            mapper(nn.Conv2d(channels, 4 * width, 1)),
            mapper(nn.Conv2d(4 * width, width, 1)),
        )
        self.norm = ChannelNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, H, W] → [N, width, H, W]."""
        return recompute(self.use_checkpoint, self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer_out(F.gelu(self.layer_in(x))))


def checked_map(x: Tensor, channels: int, name: str, setting: str) -> Tensor:
    """``x``, a condition [N, channels, h, w]. InputError for another number of channels."""
    if x.dim() != 4 or x.shape[1] != channels:
        raise InputError(f"{name} has the shape {tuple(x.shape)}, but must have {channels} channels ({setting})")
    return x
