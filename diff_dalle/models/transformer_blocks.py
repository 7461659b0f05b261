"""Blocks of the transformer: joint attention of image and text tokens, and SwiGLU, both modulated by the timestep.

Tokens are [N, T + S, C]: T of the image, then S of the text. Every block's modulation is a common part, from the
embedding of timestep and conditions, plus a table of its own (Chen et al. 2023, PixArt-α, adaLN-single).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .attention import attend
from .dropout import Dropout
from .layers import recompute
from .token_functions import modulated_norm, swiglu, turned_norm

MULTIPLE = 32  # of which the channels of hidden layers are one: matrix products of odd sizes are slow
SIGNALS = 6  # scale, shift and gate of attention, and of the feed-forward layer
WAVELENGTH = 10000.0  # almost that of the slowest rotation, in 2π positions (Su et al. 2021, §3.2.2)


class Modulation(nn.Module):
    """The common modulation [N, signals, C] plus the block's own, as ``signals`` tensors [N, 1, C], in fp32."""

    def __init__(self, signals: int, width: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(signals, width))

    def forward(self, common: Tensor) -> tuple[Tensor, ...]:
        return (common + self.table)[:, :, None].unbind(1)


class TurnedNorm(nn.Module):
    """See ``turned_norm``."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        return turned_norm(x, self.weight, turn)


class Stream(nn.Module):
    """The weights of a block for tokens of one modality, or for all of them.

    The hidden layer has 8/3 of the width, rounded up, so that SwiGLU has the weights of a feed-forward layer
    of four times the width (Shazeer 2020).
    """

    def __init__(self, width: int, heads: int, drop: float):
        super().__init__()
        self.heads, hidden = heads, -(-8 * width // (3 * MULTIPLE)) * MULTIPLE
        self.modulation = Modulation(SIGNALS, width)
        self.attention_qkv, self.attention_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = TurnedNorm(width // heads), TurnedNorm(width // heads)
        self.mlp_in, self.mlp_out = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.attention_dropout, self.mlp_dropout = Dropout(drop), Dropout(drop)

    def qkv(self, x: Tensor, scale: Tensor, shift: Tensor, turn: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values: [N, T, C] each."""
        q, k, v = self.attention_qkv(modulated_norm(x, scale, shift)).chunk(3, -1)
        norms = (self.q_norm, q), (self.k_norm, k)
        return *(norm(each.unflatten(-1, (self.heads, -1)), turn).flatten(2) for norm, each in norms), v

    def finish(self, x: Tensor, attended: Tensor, signals: Sequence[Tensor], keys: Tensor | None) -> Tensor:
        """x with both branches added."""
        gate, scale, shift, mlp_gate = signals
        x = _gated(x, gate, self.attention_dropout(self.attention_proj(attended), keys))
        h = self.mlp_out(swiglu(self.mlp_in(modulated_norm(x, scale, shift))))
        return _gated(x, mlp_gate, self.mlp_dropout(h, keys))


def _gated(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    return torch.addcmul(x, gate.to(x.dtype), branch.to(x.dtype))


class TransformerBlock(nn.Module):
    """A block whose image and text tokens have weights of their own (separate; Esser et al. 2024, MM-DiT) or share
    them. The identity at initialization."""

    joins_text = True  # its output is not of the image alone; see ``tasks.alignment``

    def __init__(self, width: int, heads: int, drop: float, separate: bool, use_checkpoint: bool):
        super().__init__()
        self.heads, self.use_checkpoint, self.is_separate = heads, use_checkpoint, separate
        self.streams: Iterable[Stream] = nn.ModuleList(Stream(width, heads, drop) for _ in range(1 + separate))  # type: ignore[assignment]

    def forward(
        self, x: Tensor, images: int, common: Tensor, turn: Tensor, mask: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        """x: [N, T + S, C]; images: T; common: [N, SIGNALS, C]; turn: see ``turned_norm``; mask: see ``attend``; keys:
        of dropout."""
        function = partial(self._forward, images)
        return recompute(self.use_checkpoint, function, x, common, turn, mask, keys, random=keys is None)

    def _forward(
        self, images: int, x: Tensor, common: Tensor, turn: Tensor, mask: Tensor | None, keys: Tensor | None
    ) -> Tensor:
        sizes = [images, x.shape[1] - images] if self.is_separate else [x.shape[1]]
        pieces, found, signals = x.split(sizes, 1), [], []
        for stream, piece, turned in zip(self.streams, pieces, turn.split(sizes, -2), strict=True):
            scale, shift, *others = stream.modulation(common)
            found.append(stream.qkv(piece, scale, shift, turned))
            signals.append(others)
        q, k, v = map(_joined, zip(*found, strict=True))
        attended = attend(q, k, v, self.heads, mask).split(sizes, 1)
        streams = zip(self.streams, pieces, attended, signals, strict=True)
        return _joined([stream.finish(piece, own, given, keys) for stream, piece, own, given in streams])


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 1)


def turns(positions: Tensor, width: int) -> Tensor:
    """The rotations of tokens in the plane: a quarter of a head's channels each for rows and columns, in pairs.

    positions: [T, 2]; width: channels of a head, a multiple of 4. Returns [2, T, width / 2], cosines and sines.
    """
    count = width // 4
    frequencies = WAVELENGTH ** -(torch.arange(count, dtype=torch.float32, device=positions.device) / count)
    angles = (positions[:, :, None] * frequencies).flatten(1)
    return torch.stack([angles.cos(), angles.sin()])
