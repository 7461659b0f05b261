"""GLIDE's noised CLIP (Nichol et al. 2022, §2.4): a vision transformer that is told the timestep, and a causal text
encoder."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..config import Fault, InputError, named, option, settings
from ..config.bounds import MAX_ROWS, MAX_SIDE, MAX_STEPS
from .layers import to_image, to_tokens
from .noised_clip import check_image_size, normalized
from .norms import LayerNorm32
from .options import blocks_option, width_option
from .text_encoder import TextBlock

# Of pixels from 0 to 255 (Radford et al. 2021).
MEANS, DEVIATIONS = (122.77093945, 116.74601272, 104.09373519), (68.50053285, 66.63215831, 70.32316309)


@settings
class VitClipConfig:
    """Classifier (noised CLIP with a vision transformer)"""

    image_size: int = option(64, "image resolution in pixels; it accepts no other", least=1, most=MAX_SIDE)
    patch_size: int = option(4, "patch size in pixels", least=1, most=MAX_SIDE)
    timesteps: int = option(1000, "noising steps of its training, each with an embedding", least=1, most=MAX_STEPS)
    dim: int = width_option(512, "dimension of the joint embedding space")
    image_width: int = width_option(768, "width of the image tower")
    image_depth: int = blocks_option(12, "transformer layers of the image tower")
    image_heads: int = width_option(12, "attention heads of the image tower")
    text_width: int = width_option(512, "width of the text tower")
    text_depth: int = blocks_option(12, "transformer layers of the text tower")
    text_heads: int = width_option(8, "attention heads of the text tower")
    text_length: int = width_option(77, "maximum caption length in tokens, start and end tokens included", least=2)
    token_rows: int = option(65536, "number of token embeddings, at least the vocabulary size", least=1, most=MAX_ROWS)
    logit_scale: float = option(100.0, "scale of the cosines", above=0)

    def faults(self) -> Iterator[Fault]:
        if self.image_size % self.patch_size:
            yield Fault.of(self, "image_size", f"must be a multiple of {named('patch_size')} ({self.patch_size})")
        for tower in ("image", "text"):
            heads = getattr(self, f"{tower}_heads")
            if getattr(self, f"{tower}_width") % heads:
                yield Fault.of(self, f"{tower}_width", f"must be a multiple of {named(f'{tower}_heads')} ({heads})")


class VitTower(nn.Module):
    """Images at a timestep → features: patches after a token of the timestep, whose last state is projected."""

    def __init__(self, config: VitClipConfig):
        super().__init__()
        width, depth = config.image_width, config.image_depth
        self.time_emb = nn.Parameter(torch.randn(config.timesteps, width) / math.sqrt(width))
        self.patches = nn.Conv2d(3, width, config.patch_size, config.patch_size, bias=False)
        positions = 1 + (config.image_size // config.patch_size) ** 2
        self.position_emb = nn.Parameter(torch.randn(positions, width) / math.sqrt(width))
        self.in_norm = LayerNorm32(width)
        self.blocks = nn.ModuleList(TextBlock(width, config.image_heads, 0.0, depth) for _ in range(depth))
        self.norm, self.proj = LayerNorm32(width), nn.Linear(width, config.dim, bias=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """x: [N, 3, H, W] in the range [-1, 1] of images; t: [N] → [N, dim]."""
        return self.proj(self.states(x, t)[:, 0])

    def states(self, x: Tensor, t: Tensor) -> Tensor:
        """[N, 1 + patches, image_width]: the states of the timestep's token and of the patches after the last norm."""
        means, deviations = (x.new_tensor(each).float()[:, None, None] for each in (MEANS, DEVIATIONS))
        pixels = ((x.float() + 1) * 127.5 - means) / deviations
        first = self.time_emb[t.round().long().clamp(0, len(self.time_emb) - 1)]
        h = torch.cat([first[:, None], to_tokens(self.patches(pixels)).float()], 1) + self.position_emb
        h = self.in_norm(h)
        for block in self.blocks:
            h = block(h, None, None)
        return self.norm(h)


class CausalTower(nn.Module):
    """Captions → features: the state of the end token, projected. Every token attends to itself and to those before."""

    def __init__(self, config: VitClipConfig):
        super().__init__()
        width, depth = config.text_width, config.text_depth
        self.token_emb = nn.Parameter(0.02 * torch.randn(config.token_rows, width))
        self.position_emb = nn.Parameter(0.01 * torch.randn(config.text_length, width))
        self.blocks = nn.ModuleList(TextBlock(width, config.text_heads, 0.0, depth) for _ in range(depth))
        self.norm, self.proj = LayerNorm32(width), nn.Linear(width, config.dim, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """tokens, mask: [N, L] → [N, dim]; the mask of an empty caption covers its start token alone."""
        length = tokens.shape[1]
        if length > len(self.position_emb):
            most = len(self.position_emb)
            raise InputError(f"the captions have {length} tokens, but {named('text_length')} is {most}")
        h = self.token_emb[tokens] + self.position_emb[:length]
        before = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril().expand(len(tokens), -1, -1)
        for block in self.blocks:
            h = block(h, before, None)
        end = mask.sum(1).clamp(min=2) - 1
        return self.proj(self.norm(h[torch.arange(len(h), device=h.device), end]))


class VitClip(nn.Module):
    """Both towers, which return L2-normalized features, as ``NoisedClip`` does."""

    def __init__(self, config: VitClipConfig):
        super().__init__()
        self.config = config
        self.image_tower, self.text_tower = VitTower(config), CausalTower(config)

    @property
    def scale(self) -> float:
        """The logit scale."""
        return self.config.logit_scale

    def encode_image(self, x: Tensor, t: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Image features.

        x: [N, 3, image_size, image_size]; t: [N], steps of the original process, as for a denoiser.
        Returns [N, dim] float32, L2-normalized. Raises InputError for images of the wrong size.
        """
        check_image_size(x, self.config.image_size)
        return normalized(self.image_tower(x, t))

    def feature_map(self, x: Tensor) -> Tensor:
        """The states of the patches of clean images: [N, 3, image_size, image_size] → [N, image_width, h, w]."""
        side = self.config.image_size // self.config.patch_size
        return to_image(self.image_tower.states(x, x.new_zeros(len(x)))[:, 1:], (side, side))

    def encode_text(self, tokens: Tensor, mask: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Text features. tokens, mask: [N, L]. Returns [N, dim] float32, L2-normalized."""
        return normalized(self.text_tower(tokens, mask))
