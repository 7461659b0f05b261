"""A generator: text encoder and U-Net, trained together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..batch import Conditioning
from ..config import section
from ..errors import InputError
from .dropout import number_dropouts
from .text_encoder import TextEncoder, TextEncoderConfig
from .unet import UNet, UNetConfig


@dataclass(frozen=True)
class GeneratorConfig:
    """Generator"""

    unet: UNetConfig = section(UNetConfig)
    text: TextEncoderConfig = section(TextEncoderConfig)


class Generator(nn.Module):
    """Predicts what the diffusion process needs from a noisy image, its timestep, caption and class.

    vocab_size:   of the tokenizer; not used by a network without text (``enc_attn_dim`` 0).
    out_channels: 3, or 6 when the variance is learned too.
    in_channels:  of the image that goes in.
    """

    def __init__(self, config: GeneratorConfig, vocab_size: int, out_channels: int = 3, in_channels: int = 3):
        super().__init__()
        self.config = config
        self.text_encoder = TextEncoder(config.text, vocab_size) if config.text.enc_attn_dim else None
        self.unet = UNet(config.unet, in_channels, out_channels, config.text.enc_attn_dim)
        number_dropouts(self)

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """``cond`` with ``text_states`` and ``text_pooled`` filled in, unless they are or the network has no text.

        Sampling calls it once, so that the text is not encoded at every step. Raises InputError without a caption.
        """
        if self.text_encoder is None or cond.text_states is not None:
            return cond
        if cond.tokens is None or cond.mask is None:
            width = self.config.text.enc_attn_dim
            raise InputError(f"the network expects captions (enc_attn_dim is {width}), but cond lacks tokens or mask")
        states, pooled = self.text_encoder(cond.tokens, cond.mask, cond.dropout_keys)
        return replace(cond, text_states=states, text_pooled=pooled)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        """x: [N, in_channels, H, W]; t: [N], whole or fractional. Returns [N, out_channels, H, W] float32.

        Conditions that the network was not built for are left aside; one that it needs and lacks is an InputError.
        """
        return self.unet(x, t, self.encode_text(cond or Conditioning()))
