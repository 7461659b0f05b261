"""The generator: a text encoder and a denoiser, trained jointly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..batch import Conditioning
from ..config import Fault, named, option, section, settings
from ..config.bounds import MAX_WIDTH
from .dropout import number_dropouts
from .super_resolution import LevelEmbedding, LowResConfig, upsample_low_res
from .text_encoder import TextEncoder, TextEncoderConfig, encode_captions
from .transformer import DenoiserConfig, Transformer
from .unet import UNet


@settings
class GeneratorConfig:
    """Generator"""

    unet: DenoiserConfig = section(DenoiserConfig)
    text: TextEncoderConfig = section(TextEncoderConfig)
    low_res: LowResConfig = section(LowResConfig)
    image_channels: int = option(3, "image channels: 3 = RGB, 1 = grayscale", most=MAX_WIDTH)
    inpaint: bool = option(
        False,
        "inpainting network (GLIDE), which also takes the masked image and its mask; in training, masks are random",
    )

    def faults(self) -> Iterator[Fault]:
        if self.image_channels not in (1, 3):
            yield Fault.of(self, "image_channels", "must be 3 (RGB) or 1 (grayscale)")
        large, small = self.unet.image_size, self.low_res.small_size
        if small and (small >= large or large % small):
            rule = f"must be smaller than {named('unet.image_size')} ({large}) and divide it"
            yield Fault.of(self, "low_res.small_size", rule)
        if self.unet.is_transformer and self.unet.separate_blocks and not self.text.enc_attn_dim:
            rule = f"are for text, but {named('text.enc_attn_dim')} is 0: set it, or leave them out"
            yield Fault.of(self, "unet.separate_blocks", rule)

    @property
    def channels(self) -> int:
        """Channels of the denoised signal."""
        return self.image_channels

    @property
    def is_upsampler(self) -> bool:
        return self.low_res.small_size > 0

    @property
    def factor(self) -> int:
        """Upsampling factor from input to output; 1 for a base generator."""
        return self.unet.image_size // (self.low_res.small_size or self.unet.image_size)


class Generator(nn.Module):
    """A denoiser conditioned on timestep, caption and class; an upsampler also on a low-resolution image, an inpainting
    network on the known part of the image (Nichol et al. 2022, GLIDE, §2.3).

    vocab_size:       vocabulary size of the tokenizer; unused without text (``enc_attn_dim`` 0).
    learned_variance: output twice the channels; the second half parametrizes the variance.

    Conditions that the network requires: with text, ``mask`` and either ``tokens`` or, from an external encoder,
    ``text_states`` and ``text_pooled``; with ``num_classes``, ``labels``; an upsampler, ``low_res``, ``low_res_level``
    and ``low_res_blur``. A missing one is an InputError. ``dropout_keys`` is optional, and so is ``known`` of an
    inpainting network: without it nothing is known. Conditions that the network was
    not built for are ignored, so that one ``Conditioning`` can serve all stages of a cascade.
    """

    def __init__(self, config: GeneratorConfig, vocab_size: int, learned_variance: bool = False):
        super().__init__()
        self.config = config
        self.text_encoder = TextEncoder(config.text, vocab_size) if config.text.enc_attn_dim else None
        width, text_width, channels = config.unet.num_channels, config.text.enc_attn_dim, config.channels
        out_channels = 2 * channels if learned_variance else channels
        in_channels = channels * (1 + config.is_upsampler) + (channels + 1) * config.inpaint
        has_levels = config.is_upsampler and config.low_res.low_res_levels
        levels = LevelEmbedding(width, config.unet.emb_width) if has_levels else None
        network = Transformer if config.unet.is_transformer else UNet
        denoiser = network(config.unet, in_channels, out_channels, text_width, levels)
        self.add_module(config.unet.network, denoiser)  # ``unet`` in state dicts, as before there were others
        number_dropouts(self)

    @property
    def denoiser(self) -> UNet | Transformer:
        """The network that sees the image."""
        return self.get_submodule(self.config.unet.network)  # type: ignore[return-value]

    @property
    def middle_block(self) -> str:
        """The dotted name of the block with the most abstract features."""
        return f"{self.config.unet.network}.{self.denoiser.middle_block}"

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """``cond`` with ``text_states`` and ``text_pooled`` from ``tokens``; unchanged if they are set or unused.

        Sampling calls this once, so that the text is not encoded again at every step. Raises InputError when the
        network requires captions and ``cond`` has none.
        """
        return encode_captions(self.text_encoder, cond)

    def forward(
        self, x: Tensor, t: Tensor, cond: Conditioning | None = None, control: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """x: [N, C, H, W]; t: [N], integer or fractional steps of the original process; control: see ``UNet``
        and ``Transformer``.

        Returns [N, C, H, W] float32, or [N, 2C, H, W] with a learned variance. Raises InputError for a missing
        condition and for an image size that the network does not support.
        """
        cond = encode_captions(self.text_encoder, cond or Conditioning())
        if self.config.inpaint:
            known = cond.known
            if known is None:
                known = x.new_zeros(len(x), self.config.channels + 1, *x.shape[2:])
            x = torch.cat([x, known.to(x.dtype)], 1)
        if not self.config.is_upsampler:
            return self.denoiser(x, t, cond, control)
        low_res = upsample_low_res(cond, x.shape[2:])
        output = self.denoiser(torch.cat([x, low_res.to(x.dtype)], 1), t, cond, control)
        if not self.config.low_res.low_res_skip:
            return output
        channels = self.config.channels
        return torch.cat([output[:, :channels] + low_res, output[:, channels:]], 1)
