"""What can be trained: the contract between a task and the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor, nn

from ..batch import Batch
from ..randomness import Draw

Piece = tuple[Batch, Draw]
Forward = Callable[[Batch, Draw, bool], dict[str, Tensor]]


class Task(nn.Module):
    """Turns a batch into named losses.

    A task knows neither optimizer nor EMA, device, process or file. It is a module so that whatever wraps modules
    (DistributedDataParallel, torch.compile) can wrap it; ``model`` is the network whose weights are saved.
    """

    model: nn.Module

    #: Names of entries of ``losses`` that ``observe`` wants to see, gathered from all ranks, after every step.
    observed: tuple[str, ...] = ()

    #: Samples that ``held_out`` gets at a time, whatever the batch is in training: what it finds may depend on it.
    held_out_block: int = 8

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """Named values [N] float32. "loss" is minimised, the rest is reported; NaN = does not apply to this sample.

        ``draw`` supplies every random number.
        """
        raise TypeError(f"{type(self).__name__} does not define losses(batch, draw)")

    def forward(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        return self.losses(batch, draw)

    def backward(self, pieces: Sequence[Piece], forward: Forward, scale: Tensor | float) -> list[dict[str, Tensor]]:
        """Accumulate the gradient of ``scale`` × the mean loss over all pieces (the micro-batches of one batch).

        ``forward(batch, draw, sync)`` is ``self.losses`` under autocast and whatever wraps the task; ``sync`` asks for
        the exchange of gradients between ranks during the following backward pass: True for the last one only.
        Returns the losses of each piece, detached.
        """
        total = sum(len(batch) for batch, _ in pieces)
        reports = []
        for i, (batch, draw) in enumerate(pieces):
            losses = forward(batch, draw, i == len(pieces) - 1)
            (losses["loss"].sum() * (scale / total)).backward()
            reports.append({name: value.detach() for name, value in losses.items()})
        return reports

    def held_out(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        """What to report about unseen samples, as ``losses`` does; called without gradient, in evaluation mode."""
        return self.losses(batch, draw)

    def findings(self, values: Mapping[str, float]) -> tuple[str, dict[str, np.ndarray]]:
        """What the means of ``held_out`` say, for people: a text for the log ("" = nothing to add), and named pictures
        (uint8 [H, W, 3]), each of which replaces the one of the evaluation before."""
        return "", {}

    def previews(self) -> dict[str, np.ndarray]:
        """Named pictures (uint8 [H, W, 3]) that show where training stands; empty when there are none."""
        return {}

    def observe(self, values: Mapping[str, Tensor]) -> None:
        """Take in the ``observed`` entries [global N] of the step just done, in order of position."""

    def extra_state(self) -> dict[str, Tensor]:
        """State beyond the weights that a resumed run needs, such as a timestep resampler's history."""
        return {}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``extra_state`` gave."""
