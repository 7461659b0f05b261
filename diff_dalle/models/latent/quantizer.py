"""Vector quantization (van den Oord et al. 2017) of stage A's latents, and the revival of entries that are not used."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...randomness import permutation
from ..precision import autocast_disabled

DISTANCES = 2**24  # that are computed at a time: 64 MiB
USAGE_DECAY = 0.99  # of the running usage, per batch


class Quantized(NamedTuple):
    """vectors:    [N, D, h, w], the nearest entries; their gradient goes straight through to what was quantized.
    indices:       [N, h, w] int64, the entries.
    codebook_loss: [N], mean |entry - sg(z)|², which moves the entries.
    commitment:    [N], mean |z - sg(entry)|², which moves the encoder."""

    vectors: Tensor
    indices: Tensor
    codebook_loss: Tensor
    commitment: Tensor


class Quantizer(nn.Module):
    """A codebook. ``usage`` [size]: how often each entry was chosen lately, 1 = as often as on average."""

    usage: Tensor

    def __init__(self, size: int, channels: int):
        super().__init__()
        self.codebook = nn.Embedding(size, channels)
        nn.init.uniform_(self.codebook.weight, -1 / size, 1 / size)
        self.register_buffer("usage", torch.ones(size))

    @torch.no_grad()
    def nearest(self, z: Tensor) -> Tensor:
        """z: [N, D, h, w] → indices of the nearest entries [N, h, w]."""
        vectors, entries = z.permute(0, 2, 3, 1).flatten(0, 2).float(), self.codebook.weight.float()
        with autocast_disabled(z.device):
            lengths, rows = entries.square().sum(1), max(DISTANCES // len(entries), 1)
            # |z|² is the same for all entries.
            found = [torch.addmm(lengths, part, entries.T, alpha=-2).argmin(1) for part in vectors.split(rows)]
        return torch.cat(found).view(len(z), *z.shape[2:])

    def entries(self, indices: Tensor) -> Tensor:
        """[N, h, w] → [N, D, h, w]."""
        return self.codebook(indices).permute(0, 3, 1, 2)

    def forward(self, z: Tensor) -> Quantized:
        """z: [N, D, h, w]."""
        z = z.float()
        indices = self.nearest(z)
        entries = self.entries(indices)
        codebook_loss, commitment = (
            (a - b.detach()).square().flatten(1).mean(1) for a, b in ((entries, z), (z, entries))
        )
        return Quantized(z + (entries - z).detach(), indices, codebook_loss, commitment)

    def counts(self, indices: Tensor) -> Tensor:
        """How often each sample chose each entry: [N, h, w] → [N, size] float32."""
        flat = indices.flatten(1)
        return torch.zeros(len(flat), len(self.usage), device=flat.device).scatter_add_(
            1, flat, torch.ones_like(flat, dtype=torch.float32)
        )

    @torch.no_grad()
    def observe(self, counts: Tensor) -> None:
        """Update ``usage`` by the counts [N, size] of a whole batch."""
        total = counts.sum(0)
        self.usage.lerp_(total * len(total) / total.sum(), 1 - USAGE_DECAY)

    @torch.no_grad()
    def revive(self, candidates: Tensor, least: float, seed: int, step: int) -> int:
        """Replace entries; see ``revived``. Returns how many."""
        entries, usage, count = revived(self.codebook.weight, self.usage, candidates, least, seed, step)
        self.codebook.weight.copy_(entries)
        self.usage.copy_(usage)
        return count


def one_vector(z: Tensor, where: Tensor) -> Tensor:
    """One vector of each sample, a candidate for revival: z [N, D, h, w], where [N] in [0, 1), such as
    ``draw.uniform``'s → [N, D] without gradient."""
    vectors = z.detach().flatten(2)
    position = (where * vectors.shape[2]).long().clamp(max=vectors.shape[2] - 1)
    return vectors.gather(2, position[:, None, None].expand(-1, vectors.shape[1], 1)).squeeze(2)


def revived(
    entries: Tensor, usage: Tensor, candidates: Tensor, least: float, seed: int, step: int
) -> tuple[Tensor, Tensor, int]:
    """Replace the least used entries by vectors that the encoder gives, each by another.

    entries:    [size, D]; usage: [size], see ``Quantizer``.
    candidates: [M, D], of the whole batch in order of position. At most M entries are replaced.
    least:      entries with a lower usage are replaced; their usage begins anew at 1.
    seed, step: of the run: which candidates are taken is a pure function of them.

    Returns new entries and usage, and how many were replaced. The same on all processes for the same arguments.
    """
    order = usage.argsort(stable=True)
    count = min(int((usage < least).sum()), len(candidates))
    taken = permutation(seed, f"codebook revival {step}", len(candidates))[:count].astype(np.int64)
    entries, usage, dead = entries.clone(), usage.clone(), order[:count]
    entries[dead] = candidates[torch.from_numpy(taken).to(candidates.device)].to(entries.dtype)
    usage[dead] = 1.0
    return entries, usage, count
