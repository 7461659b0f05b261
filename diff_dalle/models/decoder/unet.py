"""The U-Net of the decoder of DALL·E 2 (Ramesh et al. 2022) in the form of the widely used open trainer.

Departures from that form, each with its reason:

- Self-attention scales its logits once, by 1/√(channels per head), not twice, which left it almost uniform.
- ``attend_at_middle`` and ``init_dim`` act, the first multiplier may be any, and an image embedding as wide as the
  tokens is projected like any other, so that samples never mix.
- There is no parameter without a use.
- Maps of ``combine_upsample_fmaps`` pass their convolution before they are resized, at a fraction of the cost.
- Linear attention does not divide by the number of positions: its softmax over positions has done that.
- The output layer, the timestep vector, the tokens and the statistics of norms are computed in fp32.
- Timesteps are embedded at the frequencies of ``timestep_embedding``, as in the other networks here.

``as_published`` undoes those of attention over positions and of timesteps, for weights that were trained there.

As in that form, there is no attention mask for text: positions after its end hold learned tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import SELF_COND, Conditioning
from ...config import InputError
from ..generator import resized
from ..layers import zero_init
from ..precision import autocast_disabled
from .blocks import (
    ConvNorm,
    CrossEmbed,
    LinearAttention,
    MultiQueryAttention,
    NoAttention,
    OverPositions,
    PixelShuffle,
    ResidualBlock,
)
from .conditions import Conditions
from .config import DecoderUnetConfig, Stage


class _Builder:
    """Builds the layers of a U-Net from its config."""

    def __init__(self, config: DecoderUnetConfig):
        self.config = config

    def block(
        self, channels: int, out_channels: int, groups: int, attends: bool = False, skip_scale: float = 1.0
    ) -> ResidualBlock:
        c = self.config
        return ResidualBlock(
            channels,
            out_channels,
            c.emb_width,
            groups,
            c.token_width if attends else 0,
            c.cosine_sim_cross_attn,
            c.resnet_weight_standardization,
            c.checkpoint_during_training,
            skip_scale,
        )

    def attention(self, kind: str, channels: int) -> nn.Module:
        c = self.config
        if not kind:
            return NoAttention()
        if kind == "linear":
            layer: nn.Module = LinearAttention(channels, c.attn_heads, c.attn_dim_head, c.as_published)
        else:
            cosine, twice = c.cosine_sim_self_attn, c.as_published
            layer = MultiQueryAttention(channels, c.attn_heads, c.attn_dim_head, cosine, twice)
        return OverPositions(layer, c.checkpoint_during_training)

    def stem(self, channels: int, out_channels: int) -> nn.Module:
        c = self.config
        if c.init_cross_embed:
            return CrossEmbed(channels, out_channels, c.init_cross_embed_kernel_sizes, stride=1)
        size = c.init_conv_kernel_size
        return nn.Conv2d(channels, out_channels, size, padding=size // 2)

    def downsample(self, channels: int, out_channels: int) -> nn.Module:
        if self.config.cross_embed_downsample:
            return CrossEmbed(channels, out_channels, self.config.cross_embed_downsample_kernel_sizes, stride=2)
        return nn.Conv2d(channels, out_channels, 2, stride=2)  # space-to-depth and a 1×1 convolution

    def upsample(self, channels: int, out_channels: int) -> nn.Module:
        if self.config.pixel_shuffle_upsample:
            return PixelShuffle(channels, out_channels)
        return nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(channels, out_channels, 3, padding=1))


class DownStage(nn.Module):
    """A stage on the way down: blocks, attention, and the change of width or resolution.

    attends: whether its blocks, except the first, attend to the condition tokens.
    """

    def __init__(self, build: _Builder, stage: Stage, attends: bool, is_last: bool):
        super().__init__()
        early = build.config.memory_efficient
        self.resample_in = build.downsample(stage.in_width, stage.out_width) if early else nn.Identity()
        self.block = build.block(stage.width, stage.width, stage.groups)
        self.blocks = nn.ModuleList(
            build.block(stage.width, stage.width, stage.groups, attends) for _ in range(stage.blocks)
        )
        self.attention = build.attention(stage.attention, stage.width)
        self.resample_out = (
            nn.Conv2d(stage.width, stage.out_width, 1)
            if early or is_last
            else build.downsample(stage.width, stage.out_width)
        )

    def forward(
        self, x: Tensor, emb: Tensor, tokens: Tensor | None, perturbed: Tensor | None, skips: list[Tensor]
    ) -> Tensor:
        """Appends a skip connection for each of ``blocks`` and one for the attention."""
        x = self.block(self.resample_in(x), emb)
        for block in self.blocks:
            x = block(x, emb, tokens)
            skips.append(x)
        x = self.attention(x, perturbed)
        skips.append(x)
        return self.resample_out(x)


class UpStage(nn.Module):
    """A stage on the way up: as many blocks as its way down made skip connections, attention, and the return to the
    resolution before."""

    def __init__(self, build: _Builder, stage: Stage, attends: bool, is_first: bool):
        super().__init__()
        scale = 2**-0.5 if build.config.scale_skip_connection else 1.0
        self.blocks = nn.ModuleList(
            build.block(stage.out_width + stage.width, stage.out_width, stage.groups, attends, scale)
            for _ in range(stage.blocks + 1)
        )
        self.attention = build.attention(stage.attention, stage.out_width)
        returns = build.config.memory_efficient or not is_first
        self.resample = build.upsample(stage.out_width, stage.in_width) if returns else nn.Identity()

    def forward(
        self, x: Tensor, emb: Tensor, tokens: Tensor | None, perturbed: Tensor | None, skips: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Takes its skip connections off the end of ``skips``. Returns the feature map resampled, and as it was."""
        for block in self.blocks:
            x = block(x, emb, tokens, skips.pop())
        x = self.attention(x, perturbed)
        return self.resample(x), x


class DecoderUnet(nn.Module):
    """A denoiser conditioned on an image embedding and text encodings, or an upsampler. Its output is 0 at
    initialization.

    image_embedding:  conditioned on ``cond.image_embedding``.
    low_res:          conditioned on ``cond.low_res``.
    low_res_level:    conditioned on ``cond.low_res_level``, the noise level of ``low_res``.
    learned_variance: output twice the channels; the second half parametrizes the variance.

    With ``cond_on_text_encodings`` it reads ``cond.text_states`` and ``cond.mask``; with ``self_cond``
    ``cond.extra[SELF_COND]``, an image like x, without which it takes 0. A missing one of the others is an
    InputError. Samples whose embedding or text is dropped (see ``Conditioning.drop``) get learned values in its place.
    Conditions that the network was not built for are ignored.
    """

    entries = ("encode_text",)  # see ``units``
    full_precision = ("out_conv",)  # see ``for_inference``

    def __init__(
        self,
        config: DecoderUnetConfig,
        image_embedding: bool = True,
        low_res: bool = False,
        low_res_level: bool = False,
        learned_variance: bool = False,
    ):
        super().__init__()
        if low_res_level and not low_res:
            raise InputError("low_res_level is the noise level of low_res, which this U-Net does not have")
        self.config, self.low_res, self.self_conditioned = config, low_res, config.self_cond
        build, stages, first = _Builder(config), config.stages, config.stages[0]
        self.conditions = Conditions(config, image_embedding, low_res_level, attended=len(stages) > 1)
        images = 1 + config.self_cond + low_res
        self.stem = build.stem(images * config.channels, config.stem_width)
        width = config.stem_width
        self.first_block = build.block(width, width, first.groups) if config.memory_efficient else None
        self.downs = nn.ModuleList(
            DownStage(build, stage, attends=i > 0, is_last=i == len(stages) - 1) for i, stage in enumerate(stages)
        )
        width, groups = stages[-1].out_width, stages[-1].groups
        self.middle_in = build.block(width, width, groups, attends=True)
        self.middle_attention = build.attention("self" if config.attend_at_middle else "", width)
        self.middle_out = build.block(width, width, groups, attends=True)
        self.ups = nn.ModuleList(
            UpStage(build, stage, attends=i > 0, is_first=i == 0) for i, stage in reversed(list(enumerate(stages)))
        )
        width = first.in_width if config.memory_efficient else first.out_width
        combined = stages[::-1] if config.combine_upsample_fmaps else ()
        self.combine = nn.ModuleList(
            ConvNorm(stage.out_width, config.dim, first.groups, config.resnet_weight_standardization)
            for stage in combined
        )
        self.last_block = build.block(width + len(combined) * config.dim + config.stem_width, config.dim, first.groups)
        size, channels = config.final_conv_kernel_size, config.channels
        self.out_conv = zero_init(
            nn.Conv2d(
                config.dim + low_res * channels,
                2 * channels if learned_variance else channels,
                size,
                padding=size // 2,
            )
        )

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """``cond`` with the projections of image embedding and text, which do not depend on the timestep.

        Sampling calls this once, so that they are not computed again at every step. Raises InputError for a missing
        condition.
        """
        return self.conditions.project(cond)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        """x: [N, C, H, W]; t: [N], integer or fractional steps of the original process.

        Returns [N, C, H, W] float32, or [N, 2C, H, W] with a learned variance. Raises InputError for a missing
        condition and for an image size that the network does not support.
        """
        self.config.check_size(*x.shape[2:])
        cond = self.conditions.project(cond or Conditioning())
        emb, tokens, middle_tokens = self.conditions(t, cond)
        images, low_res = [x], self._low_res(x, cond)
        if self.config.self_cond:
            images.append(cond.extra.get(SELF_COND, torch.zeros_like(x)).to(x.dtype))
        if low_res is not None:
            images.append(low_res)
        h = stem = self.stem(torch.cat(images, dim=1).contiguous(memory_format=torch.channels_last))
        if self.first_block is not None:
            h = self.first_block(h, emb)
        skips: list[Tensor] = []
        for down in self.downs:
            h = down(h, emb, tokens, cond.perturbed, skips)
        h = self.middle_attention(self.middle_in(h, emb, middle_tokens), cond.perturbed)
        h, maps = self.middle_out(h, emb, middle_tokens), []
        for up in self.ups:
            h, before = up(h, emb, tokens, cond.perturbed, skips)
            maps.append(before)
        if self.combine:
            combined = (block(each) for block, each in zip(self.combine, maps, strict=True))
            h = torch.cat([h, *(F.interpolate(each, x.shape[2:], mode="nearest") for each in combined)], dim=1)
        h = self.last_block(h, emb, skip=stem)
        with autocast_disabled(h.device):  # at low noise the prediction needs full precision
            h = h.float()
            return self.out_conv(h if low_res is None else torch.cat([h, low_res.float()], dim=1))

    def _low_res(self, x: Tensor, cond: Conditioning) -> Tensor | None:
        if not self.low_res:
            return None
        if cond.low_res is None:
            raise InputError("the network expects a low-resolution image, but cond has no low_res")
        return resized(cond.low_res, x.shape[2:]).to(x.dtype)
