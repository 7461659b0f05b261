"""Settings of the decoder's U-Nets, and the shape of the network that follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ...config import Fault, InputError, named, option, quantity, settings
from ...config.bounds import MAX_FACTOR, MAX_KERNEL
from ..options import blocks_option, width_option

Value = TypeVar("Value", bool, int)


@dataclass(frozen=True)
class Stage:
    """One resolution of the U-Net.

    in_width, out_width: channels before and after the stage on the way down; the way up has ``out_width``.
    width:               channels of its blocks on the way down, which are those of its skip connections.
    groups:              groups of its group norms.
    blocks:              residual blocks with a skip connection, besides the one each on the way down and up.
    attention:           over positions: "self", "linear" or "".
    """

    in_width: int
    out_width: int
    width: int
    groups: int
    blocks: int
    attention: str


@settings
class DecoderUnetConfig:
    """Decoder U-Net"""

    refused: ClassVar[dict[str, str]] = {
        "out_dim": "has no effect: the output has the image's channels",
        "channels_out": "follows from channels and learned_variance",
        "lowres_cond": "follows from the U-Net's place in the decoder",
        "lowres_noise_cond": "follows from use_noise_for_lowres_cond of the decoder",
    }
    idle: ClassVar[dict[str, tuple]] = {
        "out_dim": (None,),
        "channels_out": (None,),
        "lowres_cond": (False, None),
        "lowres_noise_cond": (False, None),
    }

    dim: int = width_option(128, "base channels; the timestep vector has four times as many", required=True, least=2)
    dim_mults: tuple[int, ...] = option(
        (1, 2, 4, 8),
        "width of each stage as a multiple of dim; each stage has half the resolution of the one before",
        least=1,
        most=MAX_FACTOR,
    )
    image_embed_dim: int | None = width_option(
        None, "width of the image embedding; required by a U-Net that is conditioned on it"
    )
    cond_on_image_embeds: bool | None = option(
        None, "condition on the image embedding; none = the decoder's first U-Net only"
    )
    text_embed_dim: int | None = width_option(None, "width of the text encodings; required by cond_on_text_encodings")
    cond_on_text_encodings: bool | None = option(False, "condition on text encodings, in the middle blocks")
    cond_dim: int | None = width_option(None, "width of the condition tokens; none = dim")
    channels: int = width_option(3, "image channels: 3 = RGB, 1 = grayscale")
    self_attn: tuple[bool, ...] = option((False,), "self-attention over positions, of all stages or of each")
    attn_dim_head: int = width_option(32, "channels per head of attention over positions")
    attn_heads: int = width_option(16, "heads of attention over positions")
    init_cross_embed: bool = option(True, "input layer: parallel convolutions of several kernel sizes")
    num_image_tokens: int = width_option(4, "condition tokens made from the image embedding")
    num_time_tokens: int = width_option(2, "condition tokens made from the timestep")
    self_cond: bool = option(False, "condition on the previous prediction (Chen et al. 2022)")
    sparse_attn: tuple[bool, ...] = option(
        (False,), "linear attention over positions where there is no self-attention, of all stages or of each"
    )
    cosine_sim_cross_attn: bool = option(False, "cosine similarity in attention to condition tokens")
    cosine_sim_self_attn: bool = option(False, "cosine similarity in self-attention")
    attend_at_middle: bool = option(True, "self-attention between the two middle blocks")
    max_text_len: int = width_option(
        256, "text tokens that the network sees; longer texts are cut, shorter ones padded"
    )
    add_image_embeds_to_time: bool = option(True, "add a projection of the image embedding to the timestep vector")
    init_dim: int | None = width_option(None, "channels of the input layer; none = dim")
    init_conv_kernel_size: int = option(
        7, "kernel size of the input layer without init_cross_embed; odd", most=MAX_KERNEL
    )
    init_cross_embed_kernel_sizes: tuple[int, ...] = option(
        (3, 7, 15), "kernel sizes of the input layer with init_cross_embed; odd", most=MAX_KERNEL
    )
    resnet_groups: tuple[int, ...] = width_option((8,), "groups of the group norms, of all stages or of each")
    resnet_weight_standardization: bool = option(
        False, "standardize the weights of the residual blocks' convolutions (Qiao et al. 2019)"
    )
    num_resnet_blocks: tuple[int, ...] = blocks_option(
        (2,),
        "residual blocks with a skip connection, of all stages or of each; each stage has one more",
    )
    cross_embed_downsample: bool = option(False, "downsample by parallel convolutions of several kernel sizes")
    cross_embed_downsample_kernel_sizes: tuple[int, ...] = option(
        (2, 4), "kernel sizes of cross_embed_downsample; even", most=MAX_KERNEL
    )
    memory_efficient: bool = option(
        False, "downsample at the start of each stage instead of its end, so that no stage has the full resolution"
    )
    scale_skip_connection: bool = option(False, "multiply skip connections by 1/√2")
    pixel_shuffle_upsample: bool = option(
        True, "upsample by pixel shuffle (Shi et al. 2016); False = nearest neighbor and a convolution"
    )
    final_conv_kernel_size: int = option(1, "kernel size of the output layer; odd", most=MAX_KERNEL)
    combine_upsample_fmaps: bool = option(False, "feed the last block the feature maps of all upsampling stages")
    as_published: bool = option(
        False,
        "match DALLE2-pytorch's networks exactly, as their weights require: their timestep frequencies, and "
        "attention over positions with logits scaled twice and, where linear, divided by the number of positions",
    )
    checkpoint_during_training: bool = option(
        False, "activation checkpointing: recompute activations in the backward pass to save memory", free=True
    )

    def faults(self) -> Iterator[Fault]:
        if not self.dim_mults:
            yield Fault("dim_mults", "is empty, but must have a multiplier for each stage")
        for name in ("self_attn", "sparse_attn", "resnet_groups", "num_resnet_blocks"):
            count, stages = len(getattr(self, name)), len(self.dim_mults)
            if count not in (1, stages):
                wanted = f"1, or one for each of the {stages} stages of {named('dim_mults')}"
                yield Fault(name, f"has {quantity(count, 'value')}, but must have {wanted}")
        kernels = {
            "init_conv_kernel_size": (self.init_conv_kernel_size,),
            "init_cross_embed_kernel_sizes": self.init_cross_embed_kernel_sizes,
            "cross_embed_downsample_kernel_sizes": self.cross_embed_downsample_kernel_sizes,
            "final_conv_kernel_size": (self.final_conv_kernel_size,),
        }
        for name, sizes in kernels.items():
            even = name == "cross_embed_downsample_kernel_sizes"
            for size in sizes:
                if size < 1 or size % 2 == even:
                    yield Fault(name, f"has {size}, but must be positive and {'even' if even else 'odd'}")
            if not sizes:
                yield Fault(name, "is empty, but must have a kernel size")
        if self.cond_on_text_encodings and self.text_embed_dim is None:
            yield Fault("cond_on_text_encodings", f"is True, but {named('text_embed_dim')} is none: set it")
        if self.as_published and (self.dim < 4 or self.dim % 2):
            yield Fault("dim", f"must be even and at least 4 with {named('as_published')}", self.dim)
        for groups, width in self._normalized:
            if width % groups:
                yield Fault("resnet_groups", f"has {groups}, but must divide the {width} channels of its stage")
        split = [("init_cross_embed_kernel_sizes", self.stem_width)] if self.init_cross_embed else []
        if self.cross_embed_downsample:
            split += [("cross_embed_downsample_kernel_sizes", stage.out_width) for stage in self.stages]
        for name, width in split:  # each kernel size gets a channel: see ``CrossEmbed``
            count = len(kernels[name])
            if width >> (count - 1) < 1:
                yield Fault(name, f"has {quantity(count, 'size')}, but {quantity(width, 'channel')} to share")

    @property
    def _normalized(self) -> list[tuple[int, int]]:
        """(groups, channels) of all group norms."""
        first, sizes = self.stages[0], [(self.stages[0].groups, self.dim)]
        if self.memory_efficient:
            sizes.append((first.groups, self.stem_width))
        return sizes + [(stage.groups, width) for stage in self.stages for width in (stage.width, stage.out_width)]

    @property
    def stem_width(self) -> int:
        """Channels of the input layer."""
        return self.init_dim or self.dim

    @property
    def token_width(self) -> int:
        """Width of the condition tokens."""
        return self.cond_dim or self.dim

    @property
    def emb_width(self) -> int:
        """Width of the timestep vector."""
        return 4 * self.dim

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, from the highest resolution to the lowest."""
        widths = [self.stem_width, *(self.dim * mult for mult in self.dim_mults)]
        groups, blocks = self._of_stages(self.resnet_groups), self._of_stages(self.num_resnet_blocks)
        attention, linear = self._of_stages(self.self_attn), self._of_stages(self.sparse_attn)
        return tuple(
            Stage(
                widths[i],
                widths[i + 1],
                widths[i + 1] if self.memory_efficient else widths[i],
                groups[i],
                blocks[i],
                "self" if attention[i] else "linear" if linear[i] else "",
            )
            for i in range(len(self.dim_mults))
        )

    def _of_stages(self, values: Sequence[Value]) -> Sequence[Value]:
        return values if len(values) > 1 else list(values) * len(self.dim_mults)

    @property
    def divisor(self) -> int:
        """Height and width of an image must be multiples of this."""
        return 2 ** (len(self.dim_mults) - (0 if self.memory_efficient else 1))

    @property
    def has_self_attention(self) -> bool:
        """Whether positions attend to each other anywhere."""
        return self.attend_at_middle or any(stage.attention for stage in self.stages)

    def check_size(self, height: int, width: int) -> None:
        """InputError unless height and width are multiples of ``divisor``."""
        if height % self.divisor or width % self.divisor:
            size = f"{height}" if height == width else f"{width}×{height}"
            efficient = f", {named('memory_efficient')}" if self.memory_efficient else ""
            raise InputError(
                f"the image size is {size}, but must be a multiple of {self.divisor} ({len(self.dim_mults)} stages in "
                f"{named('dim_mults')}{efficient}); change the image size, or give {named('dim_mults')} fewer stages"
            )
