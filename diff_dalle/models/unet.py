"""The U-Net of Guided-Diffusion (Dhariwal & Nichol 2021) with text conditioning, and its encoder half."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import Fault, InputError, faults_of, named, option, quantity, settings
from ..config.bounds import MAX_FACTOR, MAX_ROWS, MAX_SIDE
from .attention import AttentionBlock
from .dropout import number_dropouts
from .layers import Downsample, ResBlock, Upsample, timestep_embedding, zero_init
from .norms import GroupNorm32
from .options import blocks_option, width_option
from .precision import autocast_disabled

# Guided-Diffusion's channel multipliers by resolution of the first feature map; those below 64 are Improved Diffusion's
# for 32. A resolution in between takes the next lower entry, so that from 32 up the last feature map is at least 4×4.
CHANNEL_MULTS = {
    512: (0.5, 1, 1, 2, 2, 4, 4),
    256: (1, 1, 2, 2, 4, 4),
    128: (1, 1, 2, 3, 4),
    64: (1, 2, 3, 4),
    0: (1, 2, 2, 2),
}
IN_UNET = ("network", "unet")  # the need of settings that a transformer has not; see ``DenoiserConfig``
MAX_SIZE = 2**14  # pixels; an image of this width and height has 3 GB


@settings
class UNetConfig:
    """Network (U-Net)"""

    image_size: int = option(
        64,
        "training resolution in pixels; other sizes and aspect ratios work if the network's levels divide them",
        least=1,
        most=MAX_SIZE,
    )
    num_channels: int = width_option(128, "base channels: those of a level with multiplier 1", least=4)
    num_res_blocks: int = blocks_option(
        2, "residual blocks per level of the encoder; the decoder has one more", needs=IN_UNET
    )
    channel_mult: tuple[float, ...] = option(
        (),
        "channel multiplier of each level, each at half the resolution of the previous one; "
        "empty = Guided-Diffusion's for image_size / patch_size",
        needs=IN_UNET,
        most=MAX_FACTOR,
    )
    attention_resolutions: tuple[int, ...] = option(
        (16, 8),
        "feature-map resolutions with attention; a value between two levels selects the lower one. "
        "The middle block always has attention",
        needs=IN_UNET,
        most=MAX_SIDE,
    )
    num_heads: int = width_option(4, "attention heads")
    num_head_channels: int = width_option(
        -1,
        "channels per attention head, overrides num_heads; -1 = use num_heads",
        besides=(-1,),
    )
    num_heads_upsample: int = width_option(
        -1, "attention heads of the decoder; -1 = num_heads", besides=(-1,), needs=IN_UNET
    )
    use_scale_shift_norm: bool = option(
        True,
        "adaptive group norm: timestep, class and text embeddings scale and shift the normalized activations; "
        "False = they are added before the norm",
        needs=IN_UNET,
    )
    resblock_updown: bool = option(False, "change the resolution inside residual blocks", needs=IN_UNET)
    conv_resample: bool = option(
        True,
        "learned convolutions for up- and downsampling; no effect with resblock_updown",
        needs=(IN_UNET, ("resblock_updown", "False")),
    )
    dropout: float = option(0.0, "dropout rate in residual blocks", least=0, below=1)
    use_checkpoint: bool = option(
        False,
        "activation checkpointing: recompute activations in the backward pass to save memory",
        free=True,
    )
    num_classes: int = option(0, "number of classes; 0 = class-unconditional", least=0, most=MAX_ROWS)
    text_attention: str = option(
        "cross",
        "text conditioning: cross-attention after self-attention, or text joined to self-attention's keys and values",
        choices=("cross", "joint"),
        needs=IN_UNET,
    )
    patch_size: int = option(
        1, "patch size in pixels: space-to-depth at the input, depth-to-space at the output", least=1, most=MAX_SIDE
    )
    output_conv: int = width_option(
        0,
        "channels per pixel of a final 3×3 convolution across patch borders, against seams; 0 = no such layer",
        least=0,
    )

    def faults(self) -> Iterator[Fault]:
        for mult in self.mults:
            channels = mult * self.num_channels
            if round(channels) < 1 or abs(channels - round(channels)) > 1e-6:
                times = f"times {named('num_channels')} ({self.num_channels})"
                yield Fault("channel_mult", f"has {mult:g}, but {times} must be a positive integer")
        yield from faults_of(lambda: self.check_size(self.image_size, self.image_size))
        for level, width in enumerate(self.level_channels):
            if self.has_attention(level) or level == self.levels - 1:
                for decoder in (False, True):
                    yield from faults_of(functools.partial(self.heads, width, decoder))

    @property
    def mults(self) -> tuple[float, ...]:
        """Channel multipliers of all levels, from the highest resolution to the lowest."""
        resolution = self.image_size // self.patch_size
        return self.channel_mult or next(mults for least, mults in CHANNEL_MULTS.items() if resolution >= least)

    @property
    def level_channels(self) -> tuple[int, ...]:
        """Channels of all levels, from the highest resolution to the lowest."""
        return tuple(round(mult * self.num_channels) for mult in self.mults)

    @property
    def levels(self) -> int:
        return len(self.mults)

    @property
    def emb_width(self) -> int:
        """Channels of the embedding of timestep, class and pooled text."""
        return 4 * self.num_channels

    @property
    def divisor(self) -> int:
        """Height and width of an image must be multiples of this."""
        return self.patch_size * 2 ** (self.levels - 1)

    @property
    def has_self_attention(self) -> bool:
        """Whether positions attend to each other: always, in the middle block."""
        return True

    def check_size(self, height: int, width: int) -> None:
        """InputError unless height and width are multiples of ``divisor``."""
        if height % self.divisor or width % self.divisor:
            size = f"{height}" if height == width else f"{width}×{height}"
            raise InputError(Fault("image_size", f"is {size}, but must be a multiple of {self._divisor_rule}"))

    @property
    def _divisor_rule(self) -> str:
        return (
            f"{self.divisor} ({named('patch_size')} {self.patch_size}, {self.levels} levels); change it, or give "
            f"{named('channel_mult')} fewer levels"
        )

    def has_attention(self, level: int) -> bool:
        """Whether one of ``attention_resolutions`` selects this level, at ``image_size``."""
        resolution = self.image_size // (self.patch_size * 2**level)
        return any(resolution <= listed < 2 * resolution for listed in self.attention_resolutions)

    def heads(self, channels: int, decoder: bool = False) -> int:
        """Attention heads for a feature map with ``channels`` channels. InputError if they do not divide evenly."""
        if self.num_head_channels != -1:
            name, divisor = "num_head_channels", self.num_head_channels
        elif decoder and self.num_heads_upsample != -1:
            name, divisor = "num_heads_upsample", self.num_heads_upsample
        else:
            name, divisor = "num_heads", self.num_heads
        if channels % divisor:
            raise InputError(Fault(name, f"must divide the {channels} channels of a level with attention", divisor))
        return channels // divisor if name == "num_head_channels" else divisor


class Layers(nn.ModuleList):
    """Layers applied one after another, each to (x, emb, cond), the first one also to a skip connection if there is
    one."""

    def forward(self, x: Tensor, emb: Tensor, cond: Conditioning, skip: Tensor | None = None) -> Tensor:
        first, *others = self
        x = first(x, emb, cond) if skip is None else first(x, emb, cond, skip)
        for layer in others:
            x = layer(x, emb, cond)
        return x


class InputConv(nn.Conv2d):
    """The input layer: a 3×3 convolution with the signature of the other layers."""

    def forward(self, input: Tensor, emb: Tensor | None = None, cond: Conditioning | None = None) -> Tensor:
        return super().forward(input)


class _Builder:
    """Builds the layers of a U-Net from its config."""

    def __init__(self, config: UNetConfig, text_width: int):
        self.config, self.text_width = config, text_width

    def res(self, channels: int, out_channels: int, resample: nn.Module | None = None) -> ResBlock:
        c = self.config
        emb_width = c.emb_width
        return ResBlock(
            channels, out_channels, emb_width, c.dropout, c.use_scale_shift_norm, c.use_checkpoint, resample
        )

    def attention(self, channels: int, decoder: bool = False) -> AttentionBlock:
        c = self.config
        return AttentionBlock(channels, c.heads(channels, decoder), self.text_width, c.text_attention, c.use_checkpoint)

    def resample(self, kind: type[Downsample] | type[Upsample], channels: int) -> nn.Module:
        if self.config.resblock_updown:
            return self.res(channels, channels, kind(channels, learned=False))
        return kind(channels, self.config.conv_resample)


class Embedded(nn.Module):
    """A network that is conditioned on one embedding of timestep, class, pooled text and further conditions.

    text_width: channels of ``cond.text_states`` and ``cond.text_pooled``; 0 = no text.
    cond_emb:   embedding of further conditions, cond → [N, emb_width]; None = no further conditions.
    """

    full_precision: tuple[str, ...] = ("time_emb", "text_emb", "cond_emb")  # see ``for_inference``

    def __init__(self, config: UNetConfig, text_width: int, cond_emb: nn.Module | None):
        super().__init__()
        self.config, width = config, config.emb_width
        self.time_emb = nn.Sequential(nn.Linear(config.num_channels, width), nn.SiLU(), nn.Linear(width, width))
        # The additional row stands for "no class".
        self.label_emb = nn.Embedding(config.num_classes + 1, width) if config.num_classes else None
        self.text_emb = nn.Linear(text_width, width) if text_width else None
        self.cond_emb = cond_emb

    def embed(self, t: Tensor, cond: Conditioning) -> Tensor:
        """The sum of all embeddings (timestep, class, pooled text, ``cond_emb``) after a SiLU.

        Returns [N, emb_width] float32. Raises InputError for a missing condition.
        """
        with autocast_disabled(t.device):
            emb = self.time_emb(timestep_embedding(t, self.config.num_channels))
            if self.label_emb is not None:
                if cond.labels is None:
                    classes = self.config.num_classes
                    raise InputError(f"the network expects classes (num_classes is {classes}), but cond has no labels")
                emb = emb + self.label_emb(cond.labels)
            if self.text_emb is not None:
                if cond.text_states is None or cond.text_pooled is None or cond.states_mask is None:
                    raise InputError(
                        "the network expects encoded text, but cond lacks text_states, text_pooled or mask"
                    )
                emb = emb + self.text_emb(cond.text_pooled.float())
            if self.cond_emb is not None:
                emb = emb + self.cond_emb(cond)
            return F.silu(emb)


class UNetEncoder(Embedded):
    """The encoder half of the U-Net, middle block included.

    in_channels: channels of the input image.
    text_width, cond_emb: see ``Embedded``.

    Attributes: ``channels``, output channels; ``skip_channels``, channels of each skip connection.
    """

    def __init__(
        self, config: UNetConfig, in_channels: int = 3, text_width: int = 0, cond_emb: nn.Module | None = None
    ):
        super().__init__(config, text_width, cond_emb)
        build, widths = _Builder(config, text_width), config.level_channels
        channels = widths[0]
        self.input_blocks = nn.ModuleList(
            [Layers([InputConv(in_channels * config.patch_size**2, channels, 3, padding=1)])]
        )
        self.skip_channels = [channels]
        for level, width in enumerate(widths):
            for _ in range(config.num_res_blocks):
                attention = [build.attention(width)] if config.has_attention(level) else []
                self.input_blocks.append(Layers([build.res(channels, width), *attention]))
                channels = width
                self.skip_channels.append(channels)
            if level < config.levels - 1:
                self.input_blocks.append(Layers([build.resample(Downsample, channels)]))
                self.skip_channels.append(channels)
        self.middle = Layers([build.res(channels, channels), build.attention(channels), build.res(channels, channels)])
        self.channels = channels
        number_dropouts(self)

    def forward(
        self, x: Tensor, t: Tensor, cond: Conditioning, hint: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """x: [N, in_channels, H, W]; t: [N], integer or fractional steps of the original process; hint: added to the
        input layer's feature map.

        Returns the middle block's output [N, channels, H / divisor, W / divisor], the skip connections, and the
        embedding. Raises InputError for an image whose size is not a multiple of ``divisor`` and for a missing
        condition.
        """
        self.config.check_size(*x.shape[2:])
        emb = self.embed(t, cond)
        x = F.pixel_unshuffle(x, self.config.patch_size).contiguous(memory_format=torch.channels_last)
        skips: list[Tensor] = []
        for block in self.input_blocks:
            x = block(x, emb, cond)
            if hint is not None and not skips:
                x = x + hint
            skips.append(x)
        return self.middle(x, emb, cond), skips, emb


class UNet(nn.Module):
    """The full U-Net, a denoiser whose output is 0 at initialization. Arguments: see ``UNetEncoder``."""

    full_precision = ("out_conv", "pixel_conv")  # see ``for_inference``
    middle_block = "encoder.middle"  # a dotted name; see ``tasks.alignment``

    def __init__(
        self,
        config: UNetConfig,
        in_channels: int = 3,
        out_channels: int = 3,
        text_width: int = 0,
        cond_emb: nn.Module | None = None,
    ):
        super().__init__()
        self.config = config
        self.encoder = UNetEncoder(config, in_channels, text_width, cond_emb)
        build, widths = _Builder(config, text_width), config.level_channels
        channels, skip_channels = self.encoder.channels, list(self.encoder.skip_channels)
        self.output_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(config.num_res_blocks + 1):
                layers: list[nn.Module] = [build.res(channels + skip_channels.pop(), width)]
                channels = width
                if config.has_attention(level):
                    layers.append(build.attention(channels, decoder=True))
                if level and i == config.num_res_blocks:
                    layers.append(build.resample(Upsample, channels))
                self.output_blocks.append(Layers(layers))
        self.out_norm = GroupNorm32(channels)
        pixel_channels = config.output_conv
        self.out_conv = nn.Conv2d(channels, (pixel_channels or out_channels) * config.patch_size**2, 3, padding=1)
        self.pixel_conv = zero_init(nn.Conv2d(pixel_channels, out_channels, 3, padding=1)) if pixel_channels else None
        if self.pixel_conv is None:
            zero_init(self.out_conv)
        number_dropouts(self)

    def forward(
        self, x: Tensor, t: Tensor, cond: Conditioning | None = None, control: Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """x: [N, in_channels, H, W]; t: [N]. Returns [N, out_channels, H, W] float32. Errors: see ``UNetEncoder``.

        control: what is added to each skip connection, and last to the middle block's output; None = nothing.
        """
        cond = cond or Conditioning()
        h, skips, emb = self.encoder(x, t, cond)
        if control is not None:
            *skips, h = _added([*skips, h], control)
        for block in self.output_blocks:
            h = block(h, emb, cond, skips.pop())
        with autocast_disabled(h.device):  # at low noise the prediction needs full precision
            h = self.out_conv(self.out_norm(h.float(), silu=True))
            out = F.pixel_shuffle(h, self.config.patch_size)
            return out if self.pixel_conv is None else self.pixel_conv(F.silu(out))


def _added(maps: Sequence[Tensor], control: Sequence[Tensor | None]) -> list[Tensor]:
    """Feature maps with a control tensor added to each. InputError for another number or shape of these."""
    check_control(control, [own.shape for own in maps], "one for each skip connection and one for the middle block")
    return [own if given is None else own + given.to(own.dtype) for given, own in zip(control, maps, strict=True)]


def check_control(control: Sequence[Tensor | None], shapes: Sequence[Sequence[int]], which: str) -> None:
    """InputError for another number or shape of control tensors. which: to what they are added."""
    if len(control) != len(shapes):
        raise InputError(
            f"there are {quantity(len(control), 'control tensor')}, but the network takes {len(shapes)}: {which}"
        )
    for given, shape in zip(control, shapes, strict=True):
        if given is not None and given.shape != shape:
            found = f"a control tensor has the shape {tuple(given.shape)}"
            raise InputError(f"{found}, but is added to one of {tuple(shape)}")
