"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): the momentum of each matrix is
replaced by the nearest orthogonal matrix, so that all its directions learn at the same rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Of the odd quintic a·σ + b·σ³ + c·σ⁵, which moves singular values of 0.01 to 0.8 to between 0.7 and 1.2 in four
# iterations (Jordan et al. 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 4
RMS = 0.2  # root mean square of an update per learning rate, as AdamW's usually have (Liu et al. 2025, eq. 4)


def orthogonalized(matrices: Tensor) -> Tensor:
    """U·Vᵀ of the singular value decompositions U·S·Vᵀ, approximately: singular values above 0.01 of the largest become
    0.7 to 1.2.

    matrices: [N, m, n] fp32, m ≤ n. A matrix of zeros stays so.

    The Newton–Schulz iteration multiplies X by polynomials of X·Xᵀ. These are [m, m] and commute, so X itself is needed
    only at its two ends. It starts from X over the fourth root of Σ σ⁴, a bound of the largest singular value that is
    closer than the root of Σ σ², so that one iteration less will do.
    """
    a, b, c = QUINTIC
    gram = matrices @ matrices.mT
    peak = gram.abs().amax((1, 2), keepdim=True) + 1e-36  # without it the squares of a small gradient's are 0
    gram = gram / peak
    squared = gram.norm(dim=(1, 2), keepdim=True).clamp(min=1)  # bound of the largest σ², of gram
    gram = gram / squared
    product = torch.eye(gram.shape[1], device=gram.device).expand_as(gram)
    for left in reversed(range(ITERATIONS)):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor @ product
        if left:
            gram = factor @ gram @ factor
    return (product * (peak * squared).rsqrt()) @ matrices


class AdamW(torch.optim.AdamW):
    """torch's without the wrappers that leave its methods out of torch.compile: they import torch._dynamo, which takes
    as long as importing torch, and no update is compiled here."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(AdamW):
    """AdamW, but Muon for the parameter groups that have a ``momentum``: Nesterov's, then ``orthogonalized``, then
    scaled to the root mean square ``RMS`` (Liu et al. 2025, "Muon is scalable for LLM training"), so that learning rate
    and weight decay mean what they do for AdamW. A convolution's weight is a matrix of its outputs by all the rest.

    As with fused AdamW, the update is skipped on the device where ``found_inf`` is 1.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **defaults: Any):
        super().__init__([{"momentum": None, **group} for group in groups], **defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # the loop gives no closure
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["momentum"] is None]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["momentum"] is not None:
                self._orthogonal_step(group)

    def _orthogonal_step(self, group: dict[str, Any]) -> None:
        found = getattr(self, "found_inf", None)
        taken = 1.0 if found is None else 1 - found  # 0: the step leaves no trace
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["step"] = torch.zeros((), device=gradient.device)  # of updates, as AdamW counts them
                state["momentum"] = torch.zeros_like(gradient)
            state["step"].add_(taken)
            momentum = state["momentum"]
            if found is not None:  # also not of values that are not finite
                gradient = torch.where(found > 0, momentum, gradient)
            momentum.lerp_(gradient, 1 - group["momentum"])
            matrix = _matrix(gradient.lerp(momentum, group["momentum"]))
            wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
            by_shape.setdefault(tuple(wide.shape), []).append((parameter, wide))
        for (_, length), pairs in by_shape.items():
            parameters, matrices = zip(*pairs, strict=True)
            updates = orthogonalized(torch.stack(matrices)) * (RMS * length**0.5 * group["lr"] * taken)
            for parameter, update in zip(parameters, updates, strict=True):
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"] * taken)
                shape = parameter.movedim(1, -1).shape
                rows = update if len(update) == shape[0] else update.T
                parameter.sub_(rows.reshape(shape).movedim(-1, 1))


def _matrix(weight: Tensor) -> Tensor:
    """The weight of a layer, [outputs, inputs, ...], as a matrix [outputs, ... · inputs]: without a copy when it is
    channels last, as convolutions are in training."""
    return weight.movedim(1, -1).flatten(1)
