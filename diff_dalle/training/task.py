"""What can be trained: the contract between a task and the loop, and the means of what a task reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import Batch
from ..distributed.world import ALONE, World
from ..randomness import Draw
from ..tracking.tracker import Table

Piece = tuple[Batch, Draw]
Shown = np.ndarray | Table  # an image (uint8 [H, W, 3]), or samples one by one
Forward = Callable[[Batch, Draw, bool], dict[str, Tensor]]


class Task(nn.Module):
    """Turns a batch into named losses.

    A task knows no optimizer, EMA, device, process or file. It is a module so that DistributedDataParallel and
    torch.compile can wrap it.

    ``model`` is the network whose weights are saved and averaged. Parameters with ``requires_grad`` False are frozen:
    no gradient, no optimizer state, no average. A task with several optimizers (an autoencoder and its discriminator)
    names them in ``parts`` and overrides ``part_modules`` and ``part_losses``.
    """

    model: nn.Module

    #: One name for each optimizer, in the order of their updates within a step.
    parts: tuple[str, ...] = ("",)

    #: Names of entries of ``losses`` that are passed to ``observe``, gathered from all ranks, after every step.
    observed: tuple[str, ...] = ()

    #: Names of entries of ``losses`` that are kept for steps that were not finite (flight.py), but not logged.
    recorded: tuple[str, ...] = ()

    #: Number of samples passed to ``held_out`` at a time, whatever the training batch size.
    held_out_block: int = 8

    def __init__(self) -> None:
        super().__init__()
        #: Puts the weights in place that are not averaged, inside a block of ``previews``; None = they are in place.
        self.unaveraged: Callable[[], AbstractContextManager] | None = None
        # In a plain dict: companions are not saved, trained, or switched to training mode with the task.
        self.companions: dict[str, Any] = {}

    def add_companion(self, name: str, network: nn.Module) -> None:
        """Give the task a frozen network, such as an autoencoder or a CLIP from a checkpoint, as
        ``companions[name]``. It must be on the task's device; it is put in evaluation mode and gets no gradients."""
        self.companions[name] = network.eval().requires_grad_(False)

    def part_modules(self, part: str) -> Mapping[str, nn.Module]:
        """The modules that the optimizer ``part`` trains, by name. Modules outside ``model`` are saved with the
        optimizer's state, under these names."""
        return {"model": self.model}

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """Named values [N] float32. "loss" is minimized, the others are reported; NaN = not applicable to this sample.

        ``draw`` supplies all random numbers.
        """
        raise NotImplementedError

    def part_losses(self, part: str, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """``losses`` of one of several ``parts``."""
        return self.losses(batch, draw)

    def forward(self, batch: Batch, draw: Draw, part: str = "") -> dict[str, Tensor]:
        return self.part_losses(part, batch, draw)

    def backward(self, pieces: Sequence[Piece], forward: Forward, scale: Tensor | float) -> list[dict[str, Tensor]]:
        """Accumulate the gradient of ``scale`` × the mean loss, times the samples' weights, over all pieces (the
        micro-batches of one batch).

        ``forward(batch, draw, sync)`` calls the task under autocast and data parallelism; ``sync`` requests that the
        following backward pass exchanges gradients between ranks: True for the last piece only. Returns the detached
        losses of each piece.
        """
        total = sum(len(batch) for batch, _ in pieces)
        reports = []
        for i, (batch, draw) in enumerate(pieces):
            losses = forward(batch, draw, i == len(pieces) - 1)
            loss = losses["loss"] if batch.weight is None else losses["loss"] * batch.weight
            (loss.sum() * (scale / total)).backward()
            reports.append({name: value.detach() for name, value in losses.items()})
        return reports

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """What to report about held-out samples, as ``losses``; called without gradient, in evaluation mode."""
        return self.part_losses(self.parts[0], batch, draw)

    def findings(self, values: Mapping[str, float]) -> tuple[str, dict[str, np.ndarray]]:
        """A summary of the means of ``held_out`` for people: a text for the log ("" = none), and named figures (uint8
        [H, W, 3]), each of which replaces the one of the evaluation before. Asked for on the first rank only."""
        return "", {}

    def previews(self) -> Mapping[str, Shown]:
        """Named images and tables that show the progress of training; called on every rank."""
        return {}

    def training_findings(self) -> tuple[str, dict[str, np.ndarray]]:
        """A summary of training since the last call, in the form of ``findings``. Asked for with each preview, on the
        first rank only."""
        return "", {}

    def observe(self, values: Mapping[str, Tensor]) -> None:
        """Receive the ``observed`` entries [global N] of the step just done, in order of position."""

    def extra_state(self) -> dict[str, Tensor]:
        """State beyond the weights that a resumed run needs, such as a timestep resampler's history."""
        return {}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``extra_state``."""


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
