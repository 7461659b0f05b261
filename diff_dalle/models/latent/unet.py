"""The network that stages B and C share: a U-Net of ConvNeXt blocks, attention and timestep blocks.

Departures from the released networks, which compute the same function: the output layer, the norms' statistics and the
timestep blocks are in fp32; the transitions change the resolution on the cheaper side of their convolution; there is no
dropout of attention weights. States of text at padding count as 0 where ``cond`` has a mask (see ``ConditionTokens``);
the released networks read them, so the CLIP's outputs for these are ``released`` and mask nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...batch import Conditioning
from ...config import InputError, quantity
from ..dropout import number_dropouts
from ..layers import zero_init
from ..precision import autocast_disabled
from ..text_encoder import TextEncoder, encode_captions
from .blocks import (
    AttentionBlock,
    ChannelNorm,
    Context,
    ConvBlock,
    FeedForward,
    TimestepBlock,
    Transition,
    noise_embedding,
    resized_to,
    xavier,
)
from .conditions import ConditionTokens
from .config import LatentUnetConfig

Control = Sequence[Tensor | None]
STEM_GAIN = 0.02  # of the input layer's initial weights, as in the released networks


class LatentUnet(nn.Module):
    """A denoiser of latents whose output is 0 at initialization.

    vocab_size: vocabulary size of the tokenizer; unused without an own text encoder (``enc_attn_dim`` 0).

    ``down_blocks[i]`` has the blocks of level i, ``up_blocks[i]`` those of the i-th level from the deepest. Between the
    passes of a level that is repeated is a 1×1 convolution. On the way up the first block of every level but the
    deepest takes, in each pass, what the level had at the end of the way down.
    """

    entries = ("encode_text",)  # see ``units``
    full_precision = ("out_conv",)  # see ``for_inference``

    def __init__(self, config: LatentUnetConfig, vocab_size: int = 0):
        super().__init__()
        self.config = config
        c, widths, deepest = config, config.widths, config.depth - 1
        patch = c.channels * c.patch_size**2
        self.in_conv = xavier(nn.Conv2d(patch + 2 * c.coordinates, widths[0], 1), STEM_GAIN)
        self.in_norm = ChannelNorm(widths[0])
        self.condition_tokens = ConditionTokens(c) if c.has_tokens else None
        self.down_blocks = nn.ModuleList(self._blocks(i, c.down_blocks[i], 0) for i in range(c.depth))
        self.down_repeats = nn.ModuleList(_between(widths[i], c.down_repeats[i]) for i in range(c.depth))
        self.down_transitions = nn.ModuleList(
            Transition(widths[i], widths[i + 1], c.transitions[i], up=False) for i in range(deepest)
        )
        upwards = range(deepest, -1, -1)
        self.up_blocks = nn.ModuleList(
            self._blocks(i, blocks, widths[i] if i < deepest else 0)
            for i, blocks in zip(upwards, c.up_blocks, strict=True)
        )
        self.up_repeats = nn.ModuleList(
            _between(widths[i], passes) for i, passes in zip(upwards, c.up_repeats, strict=True)
        )
        self.up_transitions = nn.ModuleList(
            Transition(widths[i], widths[i - 1], c.transitions[i - 1], up=True) for i in upwards if i
        )
        self.out_norm = ChannelNorm(widths[0])
        self.out_conv = zero_init(nn.Conv2d(widths[0], patch, 1))
        self.text_encoder = TextEncoder(c.text, vocab_size) if c.text.enc_attn_dim else None
        number_dropouts(self)

    def _blocks(self, level: int, count: int, skip_channels: int) -> nn.ModuleList:
        letters = enumerate(self.config.levels[level] * count)
        return nn.ModuleList(self._block(letter, level, 0 if i else skip_channels) for i, letter in letters)

    def _block(self, letter: str, level: int, skip_channels: int) -> nn.Module:
        c = self.config
        width, dropout, branches = c.widths[level], c.dropout[level], sum(c.down_blocks)
        if letter == "C":
            return ConvBlock(width, skip_channels, c.kernel_size, dropout, branches, c.use_checkpoint)
        if letter == "A":
            return AttentionBlock(width, c.heads[level], c.cond_width if c.has_tokens else 0, c.use_checkpoint)
        if letter == "F":
            return FeedForward(width, dropout, branches, c.use_checkpoint)
        return TimestepBlock(
            width, c.time_width, 1 + len(c.micro_conditions), c.vector_width if c.text_modulation else 0
        )

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """``cond`` with ``text_states`` and ``text_pooled`` from ``tokens``; unchanged if they are set, or come from
        outside.

        Sampling calls this once, so that the text is not encoded again at every step. Raises InputError when the
        network requires captions and ``cond`` has none.
        """
        return encode_captions(self.text_encoder, cond)

    def add_maps(self, h: Tensor, cond: Conditioning) -> Tensor:
        """Add the maps that condition the network to the input layer's feature map h."""
        return h

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None, control: Control | None = None) -> Tensor:
        """Predict what the process asks for.

        x:       [N, channels, H, W]; patches must divide H and W, the levels need not.
        t:       [N], the noise condition in [0, 1].
        cond:    text, image embedding and maps as the config says; micro-conditions [N] in [0, 1] in ``extra``.
        control: what is added to the input of each block C, in the order in which they are passed, repeats included:
                 [N, width of its level, h, w], resized to the block's feature map, or None. At most
                 as many as ``config.residual_widths``.

        Returns [N, channels, H, W] float32. Raises InputError for a missing condition, an image size that the network
        does not support, and control tensors that it has no place for.
        """
        c = self.config
        c.check_size(*x.shape[2:])
        if control is not None and len(control) > len(c.residual_widths):
            found, most = quantity(len(control), "control tensor"), quantity(len(c.residual_widths), "residual block")
            raise InputError(f"there are {found}, but the network has {most}")
        cond = encode_captions(self.text_encoder, cond or Conditioning())
        tokens = None if self.condition_tokens is None else F.silu(self.condition_tokens(cond, len(x)))
        pooled = cond.text_pooled.flatten(1) if c.text_modulation and cond.text_pooled is not None else None
        context = Context(self._embed(t, cond), tokens, cond.dropout_keys, pooled, cond.perturbed)
        controls = iter(control or ())
        h = F.pixel_unshuffle(x, c.patch_size).contiguous(memory_format=torch.channels_last)
        if c.coordinates:
            h = torch.cat([h, _coordinates(h)], 1)
        h = self.add_maps(self.in_norm(self.in_conv(h)), cond)
        skips: list[Tensor] = []
        for level, (blocks, repeats) in enumerate(zip(self.down_blocks, self.down_repeats, strict=True)):
            if level:
                h = self.down_transitions[level - 1](h)
            h = _run(blocks, repeats, h, context, controls)
            skips.append(h)
        skip: Tensor | None = None
        for level, (blocks, repeats) in enumerate(zip(self.up_blocks, self.up_repeats, strict=True)):
            if level:
                skip = skips[-1 - level]
                h = resized_to(self.up_transitions[level - 1](h), skip.shape[2:])
            h = _run(blocks, repeats, h, context, controls, skip)
        with autocast_disabled(h.device):  # at low noise the prediction needs full precision
            return F.pixel_shuffle(self.out_conv(self.out_norm(h.float())), c.patch_size)

    def _embed(self, t: Tensor, cond: Conditioning) -> Tensor:
        """See ``Context.emb``."""
        zeros = torch.zeros_like(t, dtype=torch.float32)
        values = [t, *(cond.extra.get(name, zeros) for name in self.config.micro_conditions)]
        return torch.stack([noise_embedding(value, self.config.time_width) for value in values], 1)


def _coordinates(h: Tensor) -> Tensor:
    """[N, 2, H, W]: x and y of every position of a feature map, from -1 at one edge to 1 at the other."""
    down, across = ((2 * torch.arange(side, device=h.device, dtype=h.dtype) + 1) / side - 1 for side in h.shape[2:])
    found = torch.stack(torch.meshgrid(across, down, indexing="xy"))
    return found.expand(len(h), -1, -1, -1)


def _between(width: int, passes: int) -> nn.ModuleList:
    """The 1×1 convolutions between the passes of a level."""
    return nn.ModuleList(xavier(nn.Conv2d(width, width, 1)) for _ in range(passes - 1))


def _run(
    blocks: Any,
    repeats: Any,
    h: Tensor,
    context: Context,
    controls: Iterator[Tensor | None],
    skip: Tensor | None = None,
) -> Tensor:
    """All passes of a level. blocks, repeats: ModuleLists."""
    for past, conv in enumerate((*repeats, None)):
        if past and context.keys is not None:  # another dropout mask in each pass
            context = context._replace(keys=context.keys + 1)
        for i, block in enumerate(blocks):
            if not isinstance(block, ConvBlock):
                h = block(h, context)
                continue
            control = next(controls, None)
            if control is not None:
                h = h + _fitted(control, h)
            h = block(h, context, None if i else skip)
        if conv is not None:
            h = conv(h)
    return h


def _fitted(control: Tensor, h: Tensor) -> Tensor:
    if control.dim() != 4 or control.shape[1] != h.shape[1]:
        raise InputError(
            f"a control tensor has the shape {tuple(control.shape)}, but its residual block has {h.shape[1]} channels"
        )
    return resized_to(control, h.shape[2:]).to(h.dtype)
