"""The text encoder: a transformer that maps a caption's tokens to states for attention and one pooled vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..batch import Conditioning
from ..config import Fault, InputError, named, option, settings
from .attention import SelfAttention
from .dropout import Dropout, number_dropouts
from .layers import Linear
from .norms import LayerNorm32
from .options import blocks_option, text_length_option, width_option


@settings
class TextEncoderConfig:
    """Text encoder"""

    enc_attn_dim: int = width_option(512, "width of the text encoder; 0 = text-unconditional", least=0)
    enc_depth: int = blocks_option(6, "transformer layers of the text encoder")
    enc_heads: int = width_option(8, "attention heads of the text encoder")
    text_length: int = text_length_option()
    dropout_text: float = option(0.0, "dropout rate in the text encoder", least=0, below=1)
    enc_conv: int = blocks_option(
        0,
        "width in tokens of a convolution before each layer of the text encoder, which joins neighboring words, such "
        "as a color and its object; 0 = none",
        least=0,
    )
    text_padding: str = option(
        "masked",
        "padding of captions: masked; learned embeddings, attended to like words, with the last position as pooled "
        "text (GLIDE); the end token in place of these; or zeros: token 0, attended to like a word (Diff-DALLE)",
        choices=("masked", "learned", "end", "zeros"),
    )
    enc_norm: bool = option(True, "layer norm of the text encoder's states; False = none (Diff-DALLE)")

    def faults(self) -> Iterator[Fault]:
        if self.enc_attn_dim % self.enc_heads:
            rule = f"must be a multiple of {named('enc_heads')} ({self.enc_heads}), or 0 for no text"
            yield Fault.of(self, "enc_attn_dim", rule)
        if self.enc_conv and self.enc_conv % 2 == 0:
            yield Fault.of(self, "enc_conv", "must be an odd number of tokens, or 0 for none")
        if self.cuts_start and self.text_length < 2:
            rule = f"must be at least 2 with {named('text_padding')} {self.text_padding}: the start token is cut"
            yield Fault.of(self, "text_length", rule)

    @property
    def cuts_start(self) -> bool:
        """Whether captions lose their start token, and are pooled at the last position."""
        return self.text_padding in ("learned", "end")


class TextBlock(nn.Module):
    """A pre-LN transformer layer (Xiong et al. 2020): self-attention and MLP, each with norm, dropout and shortcut.

    With ``conv`` above 0 a convolution over so many tokens comes first. Attention alone is slow to learn which words
    belong together: for thousands of steps small generators draw the words of a caption in any combination.
    """

    is_block = True  # see ``units``

    def __init__(self, width: int, heads: int, drop: float, depth: int, conv: int = 0):
        super().__init__()
        self.conv = nn.Conv1d(width, width, conv, padding=conv // 2) if conv else None
        self.attention_norm, self.attention = LayerNorm32(width), SelfAttention(width, heads)
        self.mlp_norm = LayerNorm32(width)
        self.mlp_in, self.mlp_out = Linear(width, 4 * width), Linear(4 * width, width)
        self.attention_dropout, self.mlp_dropout = Dropout(drop), Dropout(drop)
        # Keeps the variance of the residual stream, a sum of 2 · depth branches, near 1 (Radford et al. 2019, §2.3).
        with torch.no_grad():
            for last in (self.attention.proj, self.mlp_out):
                last.weight.mul_((2 * depth) ** -0.5)

    def forward(self, x: Tensor, mask: Tensor | None, keys: Tensor | None) -> Tensor:
        if self.conv is not None:
            real = x if mask is None else x * mask[:, :, None]
            x = x + self.conv(real.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), mask), keys)
        h = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + self.mlp_dropout(h, keys)


class TextEncoder(nn.Module):
    """A bidirectional transformer with learned positions.

    summary: pooling where padding is masked: "mean" of the states of all real tokens, or the state of the "end" token.

    With ``text_padding`` "learned" (Nichol et al. 2022, GLIDE) every caption has ``text_length`` - 1 states: it loses
    its start token, and padded positions have embeddings of their own, or with "end" that of the end token, the last of
    the vocabulary. With "zeros" every caption has ``text_length``, and one that is empty has its end token.
    """

    def __init__(self, config: TextEncoderConfig, vocab_size: int, summary: str = "mean"):
        super().__init__()
        width = config.enc_attn_dim
        self.config, self.summary = config, summary
        self.token_emb = nn.Embedding(vocab_size, width)
        learned, self.end = config.text_padding == "learned", vocab_size - 1
        self.position_emb = nn.Parameter(torch.empty(config.text_length - config.cuts_start, width))
        self.padding_emb = nn.Parameter(torch.empty(config.text_length - 1, width)) if learned else None
        for table in (
            self.token_emb.weight,
            self.position_emb,
            *([] if self.padding_emb is None else [self.padding_emb]),
        ):
            # Standard deviation 1, the scale of the layers' outputs. With GPT's 0.02 the first layers' outputs
            # dominate the embeddings, and a generator takes several times as many steps to start following captions.
            nn.init.normal_(table)
        self.blocks = nn.ModuleList(
            TextBlock(width, config.enc_heads, config.dropout_text, config.enc_depth, config.enc_conv)
            for _ in range(config.enc_depth)
        )
        self.norm = LayerNorm32(width) if config.enc_norm else nn.Identity()
        self.pool = nn.Identity() if config.cuts_start else nn.Linear(width, width)
        number_dropouts(self)

    @property
    def masks_padding(self) -> bool:
        """Whether the states at padded positions are meaningless."""
        return self.config.text_padding == "masked"

    def forward(self, tokens: Tensor, mask: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode captions.

        tokens: [N, L] int64, L ≤ text_length.
        mask:   [N, L] bool, True = a real token; position 0 is always real.
        keys:   [N] int64, dropout keys; None = torch's generator.

        Returns the states [N, L, enc_attn_dim] and the projected summary [N, enc_attn_dim]. Padding affects neither;
        the states at padded positions are meaningless. With learned padding: [N, text_length - 1, enc_attn_dim], all
        of which count, and the last of them. With zeros: [N, text_length, enc_attn_dim], all of which count; of the
        summary only real tokens. Raises InputError for captions longer than text_length.
        """
        length = tokens.shape[1]
        if length > self.config.text_length:
            most = self.config.text_length
            raise InputError(f"the captions have {length} tokens, but {named('text_length')} is {most}")
        if self.config.cuts_start:
            tokens, mask = tokens[:, 1:], mask[:, 1:]
        if not self.masks_padding:
            missing = (0, len(self.position_emb) - tokens.shape[1])
            filler = self.end if self.config.text_padding == "end" else 0
            tokens, mask = F.pad(tokens.where(mask, filler), missing, value=filler), F.pad(mask, missing, value=False)
        if self.config.text_padding == "zeros":  # a caption that is empty, or dropped, has its end token there
            ends = torch.zeros_like(mask)
            ends[:, 1:2] = mask.sum(1, keepdim=True) < 2
            tokens, mask = tokens.masked_fill(ends, self.end), mask | ends
        x = self.token_emb(tokens) + self.position_emb[: tokens.shape[1]]
        if self.padding_emb is not None:
            x = torch.where(mask[:, :, None], x, self.padding_emb)
        for block in self.blocks:
            x = block(x, mask if self.masks_padding else None, keys)
        states = self.norm(x)
        if self.config.cuts_start:
            return states, self.pool(states[:, -1])
        if self.summary == "end":
            last = mask.sum(1) - 1
            return states, self.pool(states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1))
        # Dividing the sum by √length keeps the variance of independent states. In our trials the generator followed its
        # captions in half the steps that the last token's state took, which must first aggregate the others.
        real = mask.unsqueeze(2)
        return states, self.pool((states * real).sum(1) / real.sum(1).sqrt())


def encode_captions(encoder: TextEncoder | None, cond: Conditioning) -> Conditioning:
    """``cond`` with ``text_states`` and ``text_pooled`` from ``tokens``; unchanged without encoder or where they are
    set. Raises InputError for missing captions."""
    if encoder is None or cond.text_states is not None:
        return cond
    states, pooled = encoder(*cond.caption, cond.dropout_keys)
    read = None if encoder.masks_padding else states.new_ones(states.shape[:2], dtype=torch.bool)
    return replace(cond, text_states=states, text_pooled=pooled, text_mask=read)
