"""Gradient caching: the exact gradient of a loss over a large batch, with the memory of a micro-batch."""

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
    loss:                   features of all pieces together → named values [N].

    The first pass computes the features of every piece without gradient; the loss gives the features' gradients; the
    second pass backpropagates them through the network piece by piece. Both passes compute the same features, because
    all randomness, including dropout, is keyed by the sample. Returns the detached values of ``loss``.
    """
    if len(pieces) == 1:  # one pass suffices
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
