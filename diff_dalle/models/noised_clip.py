"""A noised CLIP: how well a noisy image fits a caption, for every level of noise."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import option
from ..errors import InputError
from .attention import attend
from .dropout import number_dropouts
from .layers import GroupNorm32, Linear, full_precision, to_tokens
from .text_encoder import TextEncoder, TextEncoderConfig
from .unet import UNetConfig, UNetEncoder

FIRST_SCALE = 1 / 0.07  # of the logits, where training starts (Radford et al. 2021, section 2.5)
LARGEST_SCALE = 100.0  # which training cannot pass (same section, where it is clipped)


def _flag(setting: str) -> str:
    """The classifier's name for a setting of one of its towers."""
    if setting in ("image_size", "text_length", "dropout_text"):
        return setting
    return f"classifier_{({'num_channels': 'width', 'num_res_blocks': 'depth'}).get(setting, setting)}"


@dataclass(frozen=True)
class NoisedClipConfig:
    """Classifier (noised CLIP)"""

    image_size: int = option(64, "side of the images in pixels; the classifier sees no other size")
    classifier_width: int = option(128, "channels of an image tower's level whose multiplier is 1")
    classifier_depth: int = option(2, "residual blocks per level of the image tower")
    classifier_channel_mult: tuple[float, ...] = option(
        (), "channels of each level as multiples of classifier_width; empty = the published ones for the image's size"
    )
    classifier_attention_resolutions: tuple[int, ...] = option(
        (32, 16, 8), "sides, in positions, of the image tower's feature maps with attention")  # fmt: skip
    classifier_num_heads: int = option(4, "attention heads of the image tower")
    classifier_use_scale_shift_norm: bool = option(
        True, "let the timestep scale and shift the image tower's norms, instead of being added before them"
    )
    classifier_resblock_updown: bool = option(True, "halve the resolution inside residual blocks")
    classifier_dropout: float = option(0.0, "fraction of activations dropped in residual blocks while training")
    classifier_use_checkpoint: bool = option(
        False, "save memory: compute the image tower's activations a second time in the backward pass", free=True
    )
    classifier_patch_size: int = option(1, "side in pixels of the squares that the image tower takes in as positions")
    classifier_enc_attn_dim: int = option(512, "channels of the text tower, and of the features that are compared")
    classifier_enc_depth: int = option(6, "layers of the text tower")
    classifier_enc_heads: int = option(8, "attention heads of the text tower")
    text_length: int = option(48, "tokens per caption, start and end included; longer captions are cut")
    dropout_text: float = option(0.0, "fraction of activations dropped in the text tower while training")

    def __post_init__(self):
        if self.classifier_enc_attn_dim < 1:
            raise InputError(f"classifier_enc_attn_dim is {self.classifier_enc_attn_dim}, but must be at least 1")
        try:
            _ = self.image_tower, self.text_tower
        except InputError as error:
            names = "|".join(field.name for tower in (UNetConfig, TextEncoderConfig) for field in fields(tower))
            raise InputError(re.sub(rf"\b({names})\b", lambda found: _flag(found[0]), str(error))) from None

    def _tower(self, config_class: type):
        """A tower's config, with the settings of it that this one has."""
        flags = {field.name: _flag(field.name) for field in fields(config_class)}
        return config_class(**{name: getattr(self, flag) for name, flag in flags.items() if hasattr(self, flag)})

    @property
    def image_tower(self) -> UNetConfig:
        return self._tower(UNetConfig)

    @property
    def text_tower(self) -> TextEncoderConfig:
        return self._tower(TextEncoderConfig)


class AttentionPool(nn.Module):
    """A feature map as one vector: its mean looks at every position (Radford et al. 2021, section 2.4).

    side: height and width of the feature map, which fix the number of learned positions.
    """

    def __init__(self, side: int, channels: int, heads: int, out_channels: int):
        super().__init__()
        self.heads = heads
        self.position_emb = nn.Parameter(torch.randn(side * side + 1, channels) / math.sqrt(channels))
        self.q, self.kv = Linear(channels, channels), Linear(channels, 2 * channels)
        self.proj = nn.Linear(channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, side, side] → [N, out_channels]."""
        tokens = to_tokens(x)
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + self.position_emb.to(x.dtype)
        k, v = self.kv(tokens).chunk(2, dim=-1)
        return self.proj(attend(self.q(tokens[:, :1]), k, v, self.heads, None).squeeze(1))


class NoisedClip(nn.Module):
    """An image tower, the encoder half of the diffusion U-Net with attention pooling, and a text tower.

    Both end in features of length 1, so that their product is a cosine. Trained as CLIP is (Radford et al. 2021), but
    on noised images and with the timestep as an input (Dhariwal & Nichol 2021, section 4; Nichol et al. 2022, GLIDE,
    section 2.4), ``scale × cosine`` approaches log p(caption | x_t) up to a constant that does not depend on x_t.
    """

    def __init__(self, config: NoisedClipConfig, vocab_size: int, in_channels: int = 3):
        super().__init__()
        self.config = config
        image, width = config.image_tower, config.classifier_enc_attn_dim
        self.image_tower = UNetEncoder(image, in_channels)
        channels = self.image_tower.channels
        self.norm = GroupNorm32(channels)
        self.pool = AttentionPool(image.image_size // image.divisor, channels, image.heads(channels), width)
        self.text_tower = TextEncoder(config.text_tower, vocab_size, summary="end")
        share = FIRST_SCALE / LARGEST_SCALE
        self.scale_logit = nn.Parameter(torch.tensor(math.log(share / (1 - share))))
        number_dropouts(self)

    @property
    def scale(self) -> Tensor:
        """What cosines are multiplied by, a scalar: the inverse of the softmax temperature. It nears 100, softly."""
        return LARGEST_SCALE * torch.sigmoid(self.scale_logit)

    def encode_image(self, x: Tensor, t: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """x: [N, C, image_size, image_size]; t: [N], as a denoiser sees it. Returns [N, classifier_enc_attn_dim] of
        length 1, float32. Raises InputError for images of another size."""
        side = self.config.image_size
        if tuple(x.shape[2:]) != (side, side):
            size = "×".join(map(str, reversed(x.shape[2:])))
            raise InputError(f"the classifier takes images of {side}×{side} pixels (image_size), not of {size}")
        h = self.image_tower(x, t, Conditioning(dropout_keys=dropout_keys))[0]
        return self._unit(self.pool(F.silu(self.norm(h))))

    def encode_text(self, tokens: Tensor, mask: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """tokens, mask: [N, L]. Returns [N, classifier_enc_attn_dim] of length 1, float32."""
        return self._unit(self.text_tower(tokens, mask, dropout_keys)[1])

    @staticmethod
    def _unit(features: Tensor) -> Tensor:
        with full_precision(features.device):
            return F.normalize(features.float(), dim=-1)
