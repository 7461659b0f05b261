"""Large contrastive batches in pieces: the exact gradient of a loss over all samples, in the memory of a few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..training.task import Forward, Piece

Features = dict[str, Tensor]


def cached_backward(
    pieces: Sequence[Piece],
    forward: Forward,
    loss: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    scale: Tensor | float,
) -> dict[str, Tensor]:
    """Accumulate the gradient of ``scale`` × the mean of ``loss(features)["loss"]`` (Gao et al. 2021, GradCache).

    pieces, forward, scale: as in ``Task.backward``; ``forward`` returns named features, each [N, …].
    loss:                   values [N] from the features of all pieces together; it may look at any of them.

    A first pass, without gradient, finds the features of every piece; the loss gives their gradients; a second pass
    carries these through the network piece by piece. It must find the same features again: randomness keyed by the
    sample sees to that, dropout included. Returns what ``loss`` returned, detached.
    """
    if len(pieces) == 1:  # a single pass does
        values = loss(forward(*pieces[0], True))
        (values["loss"].mean() * scale).backward()
        return {name: value.detach() for name, value in values.items()}

    with torch.no_grad():
        found = [forward(batch, draw, False) for batch, draw in pieces]
    features = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    for value in features.values():
        value.requires_grad_(value.is_floating_point())
    values = loss(features)
    (values["loss"].mean() * scale).backward()

    sizes = [len(batch) for batch, _ in pieces]
    gradients = {name: value.grad.split(sizes) for name, value in features.items() if value.grad is not None}
    for i, (batch, draw) in enumerate(pieces):
        again = forward(batch, draw, i == len(pieces) - 1)
        reached = [name for name in gradients if again[name].requires_grad]
        torch.autograd.backward([again[name] for name in reached], [gradients[name][i] for name in reached])
    return {name: value.detach() for name, value in values.items()}
