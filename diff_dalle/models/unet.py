"""The U-Net of Guided-Diffusion (Dhariwal & Nichol 2021), with text: one trunk, whole or as its encoder half."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import option
from ..errors import InputError
from .attention import AttentionBlock
from .dropout import number_dropouts
from .layers import Downsample, GroupNorm32, ResBlock, Upsample, full_precision, timestep_embedding, zero_init

# Guided-Diffusion's multipliers by side of the outermost feature map; those of 32 are Improved Diffusion's. A side in
# between takes the next smaller one's, so that the deepest feature map of 32 pixels and more keeps 4 positions a side.
CHANNEL_MULTS = {
    512: (0.5, 1, 1, 2, 2, 4, 4),
    256: (1, 1, 2, 2, 4, 4),
    128: (1, 1, 2, 3, 4),
    64: (1, 2, 3, 4),
    0: (1, 2, 2, 2),
}


@dataclass(frozen=True)
class UNetConfig:
    """Network (U-Net)"""

    image_size: int = option(64, "side of the images in pixels; other sizes and shapes that the network divides work")
    num_channels: int = option(128, "channels of a level whose multiplier is 1")
    num_res_blocks: int = option(2, "residual blocks per level on the way down; on the way up there is one more")
    channel_mult: tuple[float, ...] = option(
        (), "channels of each level as multiples of num_channels, each level at half the resolution of the one before; "
            "empty = the published ones for image_size / patch_size")  # fmt: skip
    attention_resolutions: tuple[int, ...] = option(
        (16, 8), "sides, in positions, of the feature maps with attention; a side that no level has means the next "
                 "smaller one. The middle always has attention")  # fmt: skip
    num_heads: int = option(4, "attention heads")
    num_head_channels: int = option(-1, "channels of one attention head, instead of a number of heads; -1 = num_heads")
    num_heads_upsample: int = option(-1, "attention heads on the way up; -1 = num_heads")
    use_scale_shift_norm: bool = option(
        True, "let timestep, class and text scale and shift the norms, instead of being added before them")  # fmt: skip
    resblock_updown: bool = option(False, "change resolution inside residual blocks")
    conv_resample: bool = option(True, "learned convolutions where the resolution changes (without resblock_updown)")
    dropout: float = option(0.0, "fraction of activations dropped in residual blocks while training")
    use_checkpoint: bool = option(
        False, "save memory: compute activations a second time in the backward pass", free=True)  # fmt: skip
    num_classes: int = option(0, "classes of a class-conditional network; 0 = none")
    text_attention: str = option(
        "cross", "how attention blocks see the text: by a second attention, or joined to the keys of the first",
        choices=("cross", "joint"))  # fmt: skip
    patch_size: int = option(1, "side in pixels of the squares that the network takes in as single positions")

    def __post_init__(self):
        for name in ("image_size", "num_channels", "num_res_blocks", "num_heads", "patch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.num_channels < 4:
            raise InputError(
                f"num_channels is {self.num_channels}, but must be at least 4: the timestep is embedded in it"
            )
        for name in ("num_head_channels", "num_heads_upsample"):
            if getattr(self, name) < 1 and getattr(self, name) != -1:
                raise InputError(f"{name} is {getattr(self, name)}, but must be at least 1, or -1")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout:g}, but must be from 0 up to, not including, 1")
        if self.num_classes < 0:
            raise InputError(f"num_classes is {self.num_classes}, but must not be negative")
        if self.text_attention not in ("cross", "joint"):
            raise InputError(f"text_attention is {self.text_attention!r}, but must be cross or joint")
        for mult in self.mults:
            if mult <= 0 or abs(mult * self.num_channels - round(mult * self.num_channels)) > 1e-6:
                channels = self.num_channels
                raise InputError(
                    f"channel_mult has {mult:g}, but times num_channels ({channels}) it must be a whole number"
                )
        self.check_size(self.image_size, self.image_size)
        for level, channels in enumerate(self.level_channels):
            if self.has_attention(level) or level == self.levels - 1:
                self.heads(channels)
                self.heads(channels, upward=True)

    @property
    def mults(self) -> tuple[float, ...]:
        """Multipliers of every level, the outermost first."""
        side = self.image_size // self.patch_size
        return self.channel_mult or next(mults for least, mults in CHANNEL_MULTS.items() if side >= least)

    @property
    def level_channels(self) -> tuple[int, ...]:
        """Channels of every level, the outermost first."""
        return tuple(round(mult * self.num_channels) for mult in self.mults)

    @property
    def levels(self) -> int:
        return len(self.mults)

    @property
    def divisor(self) -> int:
        """What height and width of an image must be multiples of."""
        return self.patch_size * 2 ** (self.levels - 1)

    def check_size(self, height: int, width: int) -> None:
        """InputError unless the network takes images of this size."""
        if height % self.divisor or width % self.divisor:
            size = f"{height}" if height == width else f"{width}×{height}"
            raise InputError(
                f"image_size is {size}, but must be a multiple of {self.divisor} (patch_size {self.patch_size}, "
                f"{self.levels} levels); change image_size, or give channel_mult fewer levels"
            )

    def has_attention(self, level: int) -> bool:
        """Whether the level's feature map, on a square of ``image_size``, is the largest not above a listed side."""
        side = self.image_size // (self.patch_size * 2**level)
        return any(side <= resolution < 2 * side for resolution in self.attention_resolutions)

    def heads(self, channels: int, upward: bool = False) -> int:
        """Attention heads on a feature map of so many channels. InputError when they do not divide."""
        if self.num_head_channels != -1:
            name, divisor = "num_head_channels", self.num_head_channels
        elif upward and self.num_heads_upsample != -1:
            name, divisor = "num_heads_upsample", self.num_heads_upsample
        else:
            name, divisor = "num_heads", self.num_heads
        if channels % divisor:
            raise InputError(f"{name} is {divisor}, but must divide the {channels} channels of a level with attention")
        return channels // divisor if name == "num_head_channels" else divisor


class Layers(nn.Sequential):
    """Layers of the trunk, one after another."""

    def forward(self, x: Tensor, emb: Tensor, cond: Conditioning) -> Tensor:
        for layer in self:
            x = layer(x, emb, cond)
        return x


class InputConv(nn.Conv2d):
    """The 3×3 convolution that takes the image in."""

    def forward(self, x: Tensor, emb: Tensor, cond: Conditioning) -> Tensor:
        return super().forward(x)


class _Builder:
    """Makes the trunk's layers of one config."""

    def __init__(self, config: UNetConfig, text_width: int):
        self.config, self.text_width = config, text_width

    def res(self, channels: int, out_channels: int, resample: nn.Module | None = None) -> ResBlock:
        c = self.config
        return ResBlock(channels, out_channels, 4 * c.num_channels, c.dropout, c.use_scale_shift_norm, c.use_checkpoint,
                        resample)  # fmt: skip

    def attention(self, channels: int, upward: bool = False) -> AttentionBlock:
        c = self.config
        return AttentionBlock(channels, c.heads(channels, upward), self.text_width, c.text_attention, c.use_checkpoint)

    def resample(self, kind: type[Downsample] | type[Upsample], channels: int) -> nn.Module:
        if self.config.resblock_updown:
            return self.res(channels, channels, kind(channels, learned=False))
        return kind(channels, self.config.conv_resample)


class UNetEncoder(nn.Module):
    """The way down and the middle.

    in_channels: channels of the image.
    text_width:  channels of ``cond.text_states`` and ``cond.text_pooled``; 0 = no text.
    cond_emb:    embeds further conditions, cond → [N, 4 · num_channels]; None = there are none.
    ``channels`` is the width of what comes out, ``skip_channels`` that of each feature map for the way up.
    """

    def __init__(self, config: UNetConfig, in_channels: int = 3, text_width: int = 0,
                 cond_emb: nn.Module | None = None):  # fmt: skip
        super().__init__()
        self.config = config
        build, widths = _Builder(config, text_width), config.level_channels
        emb_width = 4 * config.num_channels
        self.time_emb = nn.Sequential(
            nn.Linear(config.num_channels, emb_width), nn.SiLU(), nn.Linear(emb_width, emb_width)
        )
        # One more row than classes: "no class".
        self.label_emb = nn.Embedding(config.num_classes + 1, emb_width) if config.num_classes else None
        self.text_emb = nn.Linear(text_width, emb_width) if text_width else None
        self.cond_emb = cond_emb

        channels = widths[0]
        self.input_blocks = nn.ModuleList(
            [Layers(InputConv(in_channels * config.patch_size**2, channels, 3, padding=1))]
        )
        self.skip_channels = [channels]
        for level, width in enumerate(widths):
            for _ in range(config.num_res_blocks):
                attention = [build.attention(width)] if config.has_attention(level) else []
                self.input_blocks.append(Layers(build.res(channels, width), *attention))
                channels = width
                self.skip_channels.append(channels)
            if level < config.levels - 1:
                self.input_blocks.append(Layers(build.resample(Downsample, channels)))
                self.skip_channels.append(channels)
        self.middle = Layers(build.res(channels, channels), build.attention(channels), build.res(channels, channels))
        self.channels = channels
        number_dropouts(self)

    def embed(self, t: Tensor, cond: Conditioning) -> Tensor:
        """[N, 4 · num_channels] float32: timestep, class, text, … together, after the SiLU that all blocks share."""
        with full_precision(t.device):
            emb = self.time_emb(timestep_embedding(t, self.config.num_channels))
            if self.label_emb is not None:
                if cond.labels is None:
                    classes = self.config.num_classes
                    raise InputError(f"the network expects classes (num_classes is {classes}), but cond has no labels")
                emb = emb + self.label_emb(cond.labels)
            if self.text_emb is not None:
                if cond.text_states is None or cond.text_pooled is None or cond.mask is None:
                    raise InputError(
                        "the network expects encoded text, but cond lacks text_states, text_pooled or mask"
                    )
                emb = emb + self.text_emb(cond.text_pooled.float())
            if self.cond_emb is not None:
                emb = emb + self.cond_emb(cond)
            return F.silu(emb)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning) -> tuple[Tensor, list[Tensor], Tensor]:
        """x: [N, in_channels, H, W]; t: [N], whole or fractional steps of the original process.

        Returns the middle's output [N, channels, H / divisor, W / divisor], the outputs of all input blocks, and the
        embedding. Raises InputError for an image that the network does not divide and for a condition that is missing.
        """
        self.config.check_size(*x.shape[2:])
        emb = self.embed(t, cond)
        x = F.pixel_unshuffle(x, self.config.patch_size).contiguous(memory_format=torch.channels_last)
        skips = []
        for block in self.input_blocks:
            x = block(x, emb, cond)
            skips.append(x)
        return self.middle(x, emb, cond), skips, emb


class UNet(nn.Module):
    """The whole network: a denoiser (x_t, t, cond) → out_channels maps of the image's size, 0 at the start."""

    def __init__(self, config: UNetConfig, in_channels: int = 3, out_channels: int = 3, text_width: int = 0,
                 cond_emb: nn.Module | None = None):  # fmt: skip
        super().__init__()
        self.config = config
        self.encoder = UNetEncoder(config, in_channels, text_width, cond_emb)
        build, widths = _Builder(config, text_width), config.level_channels
        channels, skip_channels = self.encoder.channels, list(self.encoder.skip_channels)
        self.output_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(config.num_res_blocks + 1):
                layers = [build.res(channels + skip_channels.pop(), width)]
                channels = width
                if config.has_attention(level):
                    layers.append(build.attention(channels, upward=True))
                if level and i == config.num_res_blocks:
                    layers.append(build.resample(Upsample, channels))
                self.output_blocks.append(Layers(*layers))
        self.out_norm = GroupNorm32(channels)
        self.out_conv = zero_init(nn.Conv2d(channels, out_channels * config.patch_size**2, 3, padding=1))
        number_dropouts(self)

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        """x: [N, in_channels, H, W]; t: [N]. Returns [N, out_channels, H, W] float32. Errors as for the encoder."""
        cond = cond or Conditioning()
        h, skips, emb = self.encoder(x, t, cond)
        for block in self.output_blocks:
            h = block(torch.cat([h, skips.pop()], 1), emb, cond)
        with full_precision(h.device):  # the prediction's last bits matter at low noise
            h = self.out_conv(F.silu(self.out_norm(h.float())))
            return F.pixel_shuffle(h, self.config.patch_size)
