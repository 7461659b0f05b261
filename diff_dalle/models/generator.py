"""The generator: a text encoder and a denoiser, trained jointly. As an upsampler it sees the low-resolution image, its
noise level and its blur (Saharia et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import Fault, InputError, named, option, section, settings
from ..config.bounds import MAX_SIDE, MAX_WIDTH
from .dropout import number_dropouts
from .layers import timestep_embedding
from .text_encoder import TextEncoder, TextEncoderConfig, encode_captions
from .transformer import DenoiserConfig, Transformer
from .unet import UNet

LEVEL_SCALE = 1000.0  # levels in [0, 1] are embedded like timesteps in [0, 1000]


@settings
class LowResConfig:
    """Upsampling"""

    small_size: int = option(
        0,
        "input resolution of an upsampler in pixels, a divisor of image_size; 0 = base generator",
        least=0,
        most=MAX_SIDE,
    )
    low_res_skip: bool = option(
        False,
        "upsamplers: predict the residual to the bilinearly upsampled input, which converges much faster; "
        "requires prediction x_start",
    )
    low_res_levels: bool = option(
        True,
        "upsamplers: condition on the noise level and blur of the input; False = as in Guided-Diffusion and GLIDE",
    )

    def faults(self) -> Iterator[Fault]:
        for name, usual in (("low_res_skip", False), ("low_res_levels", True)):
            if getattr(self, name) != usual and not self.small_size:
                remedy = f"set {named('small_size')}, or {named(name)} {usual}"
                yield Fault(name, f"is for upsamplers, but this is a base generator: {remedy}")


class LevelEmbedding(nn.Module):
    """Embeds the noise level and blur of the low-resolution image: cond → [N, emb_width], which is added to the
    timestep embedding (Saharia et al. 2022, §2.4)."""

    def __init__(self, channels: int, emb_width: int):
        super().__init__()
        self.channels = channels
        self.layers = nn.Sequential(nn.Linear(2 * channels, emb_width), nn.SiLU(), nn.Linear(emb_width, emb_width))

    def forward(self, cond: Conditioning) -> Tensor:
        assert cond.low_res_level is not None and cond.low_res_blur is not None  # checked by upsample_low_res
        levels = (cond.low_res_level, cond.low_res_blur)
        return self.layers(torch.cat([timestep_embedding(LEVEL_SCALE * level, self.channels) for level in levels], 1))


def upsample_low_res(cond: Conditioning, size: Sequence[int]) -> Tensor:
    """``cond.low_res`` bilinearly resized to ``size`` (height, width): [N, C, *size].

    Raises InputError when ``cond`` lacks low_res, low_res_level or low_res_blur.
    """
    if cond.low_res is None or cond.low_res_level is None or cond.low_res_blur is None:
        raise InputError(
            "an upsampler requires a low-resolution image, but cond lacks low_res, low_res_level or low_res_blur"
        )
    return resized(cond.low_res, size)


def resized(images: Tensor, size: Sequence[int]) -> Tensor:
    """Images [N, C, h, w] bilinearly resized to ``size`` (height, width)."""
    if images.shape[2:] == tuple(size):
        return images
    return F.interpolate(images, tuple(size), mode="bilinear", align_corners=False)


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

    entries = ("encode_text",)  # see ``units``

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
