"""Settings that stages B and C share, with the defaults of stage C. Lists of the way up begin at the deepest level."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from ...config import Fault, InputError, named, option, quantity, section, settings
from ...config.bounds import MAX_KERNEL, MAX_SIDE, MAX_WIDTH
from ..options import blocks_option, width_option
from ..text_encoder import TextEncoderConfig

LETTERS = "CAFT"  # convolution, attention, feed-forward, timestep


@settings
class LatentTextConfig(TextEncoderConfig):
    """Text encoder"""

    enc_attn_dim: int = width_option(
        0,
        "width of a text encoder trained with the network; 0 = a frozen CLIP encodes text",
        least=0,
    )
    text_length: int = width_option(
        77,
        "length of captions in tokens, start and end tokens included; longer ones are truncated, shorter ones padded",
    )


@settings
class LatentUnetConfig:
    """Latent U-Net"""

    channels: int = width_option(4, "channels of the latents")
    patch_size: int = option(
        1,
        "patch size in latent positions: space-to-depth at the input, depth-to-space at the end",
        least=1,
        most=MAX_SIDE,
    )
    widths: tuple[int, ...] = width_option((2048, 2048), "channels of each level")
    heads: tuple[int, ...] = option((32, 32), "attention heads of each level; 0 without attention", most=MAX_WIDTH)
    levels: tuple[str, ...] = option(
        ("CTA", "CTA"),
        "layers of a block of each level: C convolution, T timestep, A attention, F feed-forward",
    )
    down_blocks: tuple[int, ...] = blocks_option((8, 24), "blocks of each level on the way down")
    up_blocks: tuple[int, ...] = blocks_option((24, 8), "blocks of each level on the way up, deepest level first")
    down_repeats: tuple[int, ...] = blocks_option(
        (1, 1), "passes through each level on the way down, with the same weights"
    )
    up_repeats: tuple[int, ...] = blocks_option((1, 1), "passes through each level on the way up, deepest level first")
    dropout: tuple[float, ...] = option(
        (0.1, 0.1), "dropout rate in the blocks C and F of each level", least=0, below=1
    )
    kernel_size: int = option(3, "kernel size of the depthwise convolutions; odd", most=MAX_KERNEL)
    coordinates: bool = option(
        False,
        "append patch coordinates, x and y from -1 to 1, to the input (Liu et al. 2018): shallow networks learn "
        "sooner where things belong",
    )
    text_modulation: bool = option(
        False, "pooled text also scales and shifts channels in blocks T: small networks learn captions sooner"
    )
    cond_width: int = width_option(2048, "width of the condition tokens")
    vector_tokens: int = width_option(4, "condition tokens made from each vector: pooled text, image embedding")
    time_width: int = width_option(
        64, "width of the embeddings of the noise condition and of each micro-condition", least=2
    )
    micro_conditions: tuple[str, ...] = option(
        ("sca", "crp"), "names of scalar conditions in [0, 1], in addition to the noise; 0 where not given"
    )
    text: LatentTextConfig = section(LatentTextConfig)
    pooled_width: int = width_option(
        1280,
        "width of the CLIP's pooled text; 0 = not conditioned on it",
        needs=("enc_attn_dim", "0"),
        least=0,
    )
    use_checkpoint: bool = option(
        False, "activation checkpointing: recompute activations in the backward pass to save memory", free=True
    )

    def faults(self) -> Iterator[Fault]:
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            yield Fault.of(self, "kernel_size", "must be positive and odd")
        if not self.widths:
            yield Fault("widths", "is empty, but must have the channels of each level")
        for name in ("heads", "levels", "down_blocks", "up_blocks", "down_repeats", "up_repeats", "dropout"):
            count = len(getattr(self, name))
            if count != self.depth:
                wanted = f"one for each of the {quantity(self.depth, 'level')} of {named('widths')}"
                yield Fault(name, f"has {quantity(count, 'value')}, but must have {wanted}")
        if self.text_modulation and not self.vector_width:
            rule = f"is True, but the network reads no pooled text: set {named('pooled_width')}"
            yield Fault("text_modulation", rule)
        if len(set(self.micro_conditions)) < len(self.micro_conditions):
            yield Fault("micro_conditions", f"is {', '.join(self.micro_conditions)}, but must not repeat a name")
        for level, (letters, width, heads) in enumerate(zip(self.levels, self.widths, self.heads, strict=False)):
            if not letters or set(letters) - set(LETTERS):
                yield Fault("levels", f"has {letters!r}, but must be made of the letters {', '.join(LETTERS)}")
            elif level < self.depth - 1 and letters[0] != "C":
                rule = "must begin with C above the deepest level: the skip connection ends there"
                yield Fault("levels", f"has {letters!r}, but {rule}")
            if "A" in letters and (heads < 1 or width % heads):
                rule = f"must divide the {width} channels of level {level}, {letters}"
                yield Fault("heads", f"has {heads}, but {rule}")

    @property
    def depth(self) -> int:
        """Number of levels."""
        return len(self.widths)

    @property
    def divisor(self) -> int:
        """Required divisor of height and width."""
        return self.patch_size

    @property
    def transitions(self) -> tuple[str, ...]:
        """How the resolution changes after each level but the last; see ``Transition``."""
        return ("strided",) * (self.depth - 1)

    @property
    def states_width(self) -> int:
        """Width of the text states that become condition tokens; 0 = none do."""
        return 0

    @property
    def vector_width(self) -> int:
        """Width of the pooled text; 0 = not conditioned on it."""
        return self.text.enc_attn_dim or self.pooled_width

    @property
    def embedding_width(self) -> int:
        """Width of the image embedding; 0 = not conditioned on it."""
        return 0

    @property
    def has_tokens(self) -> bool:
        """Whether there are condition tokens."""
        return bool(self.states_width or self.vector_width or self.embedding_width)

    @property
    def has_self_attention(self) -> bool:
        """Whether positions attend to each other anywhere."""
        return any("A" in letters for letters in self.levels)

    @property
    def residual_widths(self) -> list[int]:
        """The channels of the blocks C in the order in which one forward pass goes through them, those that are
        repeated listed each time: of the control tensors that the network takes."""
        down = zip(self.widths, self.levels, self.down_blocks, self.down_repeats, strict=True)
        up = zip(reversed(self.widths), reversed(self.levels), self.up_blocks, self.up_repeats, strict=True)
        return [
            width
            for width, letters, blocks, repeats in (*down, *up)
            for _ in range(letters.count("C") * blocks * repeats)
        ]

    def check_size(self, height: int, width: int) -> None:
        """InputError for latents that the patches do not divide, or that are too small for the levels."""
        if height % self.patch_size or width % self.patch_size:
            raise InputError(
                f"the latents have {width}×{height} positions, but {named('patch_size')} ({self.patch_size}) must "
                "divide both: change the image size"
            )
        least = self.patch_size * 2 ** sum(kind != "same" for kind in self.transitions)
        if min(height, width) < least:
            raise InputError(
                f"the latents have {width}×{height} positions, but {quantity(self.depth, 'level')} need at least "
                f"{least} on each side: use larger images or fewer levels ({named('widths')})"
            )


def redefined(name: str, default: Any) -> Any:
    """A setting of ``LatentUnetConfig`` with another default, for a class derived from it."""
    metadata = {field.name: field.metadata for field in dataclasses.fields(LatentUnetConfig)}
    return dataclasses.field(default=default, metadata=metadata[name])
