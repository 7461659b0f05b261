"""From timestep, image embedding, text and noise level to the vector and tokens that condition a decoder's U-Net."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import Conditioning
from ...config import InputError
from ..generator import LEVEL_SCALE
from ..layers import timestep_embedding
from ..norms import LayerNorm32
from ..precision import autocast_disabled
from .config import DecoderUnetConfig

IMAGE_TOKENS, IMAGE_EMB, TEXT_TOKENS = "image_tokens", "image_emb", "text_tokens"  # in ``Conditioning.extra``


def published_embedding(t: Tensor, width: int) -> Tensor:
    """``timestep_embedding`` in DALLE2-pytorch's form: sines, then cosines, and the last frequency is 1/10000."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) / (half - 1) * torch.arange(half, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


class ImageCondition(nn.Module):
    """Image embedding → tokens and, with ``add_image_embeds_to_time``, a part of the timestep vector; learned ones for
    a sample without embedding."""

    def __init__(self, config: DecoderUnetConfig, width: int):
        super().__init__()
        self.width, tokens = width, config.num_image_tokens
        self.tokens = nn.Linear(width, tokens * config.token_width)
        self.null_tokens = nn.Parameter(torch.randn(tokens, config.token_width))
        self.emb = nn.Linear(width, config.emb_width) if config.add_image_embeds_to_time else None
        self.null_emb = nn.Parameter(torch.randn(config.emb_width)) if config.add_image_embeds_to_time else None

    def project(self, cond: Conditioning) -> dict[str, Tensor]:
        """What depends on neither timestep nor dropping. Raises InputError for a missing or wrong embedding."""
        if cond.image_embedding is None:
            raise InputError("the network expects image embeddings, but cond has no image_embedding")
        embedding = cond.image_embedding.float()
        if embedding.shape[1] != self.width:
            raise InputError(
                f"the image embeddings have width {embedding.shape[1]}, but image_embed_dim is {self.width}"
            )
        projected = {IMAGE_TOKENS: self.tokens(embedding).unflatten(1, self.null_tokens.shape)}
        return projected if self.emb is None else projected | {IMAGE_EMB: F.gelu(self.emb(embedding))}

    def forward(self, cond: Conditioning) -> tuple[Tensor, Tensor | None]:
        """Tokens [N, num_image_tokens, token_width], and the part of the timestep vector [N, emb_width]."""
        tokens, emb, kept = cond.extra[IMAGE_TOKENS], cond.extra.get(IMAGE_EMB), cond.embedding_mask
        if kept is None:  # all of them, in tensors, so that every parameter has a gradient
            kept = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
        tokens = torch.where(kept[:, None, None], tokens, self.null_tokens)
        if emb is not None and self.null_emb is not None:
            emb = torch.where(kept[:, None], emb, self.null_emb)
        return tokens, emb


class TextCondition(nn.Module):
    """Text encodings → max_text_len tokens; learned ones, by position, after the end of the text and for a sample
    without text."""

    def __init__(self, config: DecoderUnetConfig, width: int):
        super().__init__()
        self.width = width
        self.tokens = nn.Linear(width, config.token_width)
        self.null_tokens = nn.Parameter(torch.randn(config.max_text_len, config.token_width))

    def project(self, cond: Conditioning) -> dict[str, Tensor]:
        """What depends on neither timestep nor dropping. Raises InputError for missing or wrong encodings."""
        if cond.text_states is None or cond.mask is None:
            raise InputError(
                "the network expects text encodings (cond_on_text_encodings), but cond lacks text_states or mask"
            )
        states = cond.text_states[:, : len(self.null_tokens)].float()
        if states.shape[2] != self.width:
            raise InputError(f"the text encodings have width {states.shape[2]}, but text_embed_dim is {self.width}")
        return {TEXT_TOKENS: self.tokens(states)}

    def forward(self, cond: Conditioning) -> Tensor:
        """[N, max_text_len, token_width]."""
        assert cond.text_states is not None and cond.mask is not None  # checked by ``project``
        most = len(self.null_tokens)
        # A dropped text has the mask of an empty one and encodings of 0.
        real = (cond.mask & torch.ne(cond.text_states, 0).any(2))[:, :most, None]
        missing = most - real.shape[1]
        tokens = F.pad(cond.extra[TEXT_TOKENS], (0, 0, 0, missing))
        return torch.where(F.pad(real, (0, 0, 0, missing)), tokens, self.null_tokens)


class Conditions(nn.Module):
    """All conditions of a U-Net except images. Computes in fp32.

    image_embedding, low_res_level: whether it is conditioned on them.
    attended:                       whether any block outside the middle attends to the tokens.
    """

    full_precision = ("time", "time_emb", "time_tokens", "image", "text", "level")  # see ``for_inference``

    def __init__(self, config: DecoderUnetConfig, image_embedding: bool, low_res_level: bool, attended: bool):
        super().__init__()
        if image_embedding and config.image_embed_dim is None:
            raise InputError("the U-Net is conditioned on image embeddings, but image_embed_dim is none: set it")
        self.dim, width, tokens = config.dim, config.emb_width, config.token_width
        self.embedded = published_embedding if config.as_published else timestep_embedding
        self.time = nn.Linear(config.dim, width)
        self.time_emb = nn.Linear(width, width)
        self.time_tokens = nn.Linear(width, config.num_time_tokens * tokens)
        self.image = ImageCondition(config, config.image_embed_dim or 0) if image_embedding else None
        self.text = TextCondition(config, config.text_embed_dim or 0) if config.cond_on_text_encodings else None
        self.level = (
            nn.Sequential(nn.Linear(config.dim, width), nn.GELU(), nn.Linear(width, width)) if low_res_level else None
        )
        self.norm = LayerNorm32(tokens) if attended else None
        self.middle_norm = LayerNorm32(tokens)
        self.token_width = tokens

    def project(self, cond: Conditioning) -> Conditioning:
        """``cond`` with the projections of image embedding and text in ``extra``; unchanged if they are there or
        unused. Raises InputError for a missing condition or one of another width."""
        found: dict[str, Tensor] = {}
        for part, name in ((self.image, IMAGE_TOKENS), (self.text, TEXT_TOKENS)):
            if part is not None and name not in cond.extra:
                with autocast_disabled(part.null_tokens.device):
                    found |= part.project(cond)
        return replace(cond, extra={**cond.extra, **found}) if found else cond

    def forward(self, t: Tensor, cond: Conditioning) -> tuple[Tensor, Tensor | None, Tensor]:
        """t: [N]; cond: from ``project``.

        Returns the timestep vector after a SiLU [N, emb_width], the condition tokens [N, S, token_width] of all
        attending blocks outside the middle, and those of the middle, text included.
        """
        with autocast_disabled(t.device):
            hidden = F.gelu(self.time(self.embedded(t, self.dim)))
            emb, tokens = self.time_emb(hidden), self.time_tokens(hidden).unflatten(1, (-1, self.token_width))
            if self.level is not None:
                if cond.low_res_level is None:
                    raise InputError("the network expects the noise level of low_res, but cond has no low_res_level")
                emb = emb + self.level(self.embedded(LEVEL_SCALE * cond.low_res_level, self.dim))
            if self.image is not None:
                image_tokens, image_emb = self.image(cond)
                tokens = torch.cat([tokens, image_tokens], dim=1)
                emb = emb if image_emb is None else emb + image_emb
            middle = tokens if self.text is None else torch.cat([tokens, self.text(cond)], dim=1)
            return F.silu(emb), None if self.norm is None else self.norm(tokens), self.middle_norm(middle)
