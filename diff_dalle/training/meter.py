"""Running means of what a task reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ..distributed.world import ALONE, World


class Meter:
    """Running means of named per-sample values, summed on the device: only ``read`` waits for it.

    losses: names of values that apply to every sample. NaN in another one marks a sample to which it does not apply.
    """

    def __init__(self, device: torch.device, losses: Collection[str] = ("loss",)):
        self.device, self.losses = device, losses
        self.names: tuple[str, ...] = ()
        self.always = torch.zeros(0, 1, dtype=torch.bool, device=device)  # which names apply to every sample
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = self.counts = torch.zeros(0, device=device, dtype=self.dtype)

    def add(self, values: Mapping[str, Tensor]) -> None:
        if tuple(values) != self.names:
            if self.names:
                raise ValueError(f"a task reported {tuple(values)} after {self.names}: the names must stay the same")
            self.names = tuple(values)
            self.sums = torch.zeros(len(values), device=self.device, dtype=self.dtype)
            self.counts = torch.zeros_like(self.sums)
            self.always = torch.tensor([[name in self.losses] for name in values], device=self.device)
        table = torch.stack([value.detach().float() for value in values.values()])  # [names, samples]
        applies = ~table.isnan() | self.always
        self.sums += torch.where(applies, table, 0.0).sum(1)
        self.counts += applies.sum(1)

    def read(self, world: World = ALONE) -> dict[str, float]:
        """The means over all ranks of ``world`` since the last call. Waits for the device; a collective: every rank
        calls it."""
        both = torch.stack([self.sums, self.counts]).tolist()
        mine = dict(zip(self.names, zip(*both, strict=True), strict=True))
        self.sums.zero_()
        self.counts.zero_()
        means = {}
        gathered = world.gather(mine)  # by name: a rank may have had nothing to add
        for name in dict.fromkeys(name for part in gathered for name in part):
            total, count = (sum(part[name][i] for part in gathered if name in part) for i in (0, 1))
            if count > 0:
                means[name] = total / count
        return means
