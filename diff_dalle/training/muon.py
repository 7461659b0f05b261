"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): the momentum of each matrix is
replaced by the nearest orthogonal matrix, so that all its directions learn at the same rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.dealing import Dealing, Holders, Shape
from ..distributed.parallel import is_sharded, local
from ..distributed.world import ALONE, World
from ..models.precision import DTYPES, resolve_precision

# Of the odd quintic a·σ + b·σ³ + c·σ⁵, which moves singular values of 0.01 to 0.8 to between 0.7 and 1.2 in four
# iterations (Jordan et al. 2024).
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 4
# After so many in bf16, X itself is computed, and its Gram matrix anew: negative eigenvalues, which rounding gives to a
# Gram matrix, grow 12-fold in each iteration, and would be all that is left.
HALF_ITERATIONS = 2
RMS = 0.2  # root mean square of an update per learning rate, as AdamW's usually have (Liu et al. 2025, eq. 4)


def orthogonalized(matrices: Tensor) -> Tensor:
    """U·Vᵀ of the singular value decompositions U·S·Vᵀ, approximately: singular values above 0.01 of the largest become
    0.7 to 1.2.

    matrices: [N, m, n] fp32 or bf16, m ≤ n. A matrix of zeros stays so. In bf16 the result differs from that in fp32 by
              a few percent of its norm, and where most singular values are 0 by a tenth.

    The Newton–Schulz iteration multiplies X by polynomials of X·Xᵀ. These are [m, m] and commute, so X itself is needed
    only at its two ends. It starts from X over the fourth root of Σ σ⁴, a bound of the largest singular value that is
    closer than the root of Σ σ², so that one iteration less will do.
    """
    dtype = matrices.dtype
    gram = (matrices @ matrices.mT).float()
    peak = gram.abs().amax((1, 2), keepdim=True) + 1e-36  # without it the squares of a small gradient's are 0
    gram = gram / peak
    squared = gram.norm(dim=(1, 2), keepdim=True).clamp(min=1)  # bound of the largest σ², of gram
    gram, scale = (gram / squared).to(dtype), (peak * squared).rsqrt()
    if dtype == torch.float32:
        return (_polynomial(gram, ITERATIONS) * scale) @ matrices
    matrices = (_polynomial(gram, HALF_ITERATIONS) * scale).to(dtype) @ matrices
    return _polynomial(matrices @ matrices.mT, ITERATIONS - HALF_ITERATIONS) @ matrices


def _polynomial(gram: Tensor, iterations: int) -> Tensor:
    """What iterations multiply X by, from its Gram matrices X·Xᵀ, [N, m, m]."""
    a, b, c = QUINTIC
    product: Tensor | None = None
    for left in reversed(range(iterations)):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
        if left:
            gram = factor @ gram @ factor
    assert product is not None
    return product


def multiplications(shape: Shape) -> float:
    """Of ``orthogonalized`` in fp32, for one matrix [m, n], m ≤ n."""
    m, n = shape
    return m * m * (2 * n + 13 * m)


class AdamW(torch.optim.AdamW):
    """torch's without the wrappers that leave its methods out of torch.compile: they import torch._dynamo, which takes
    as long as importing torch, and no update is compiled here. The kernel gets this rank's shards, since dispatching
    sharded tensors to it takes seconds in the first update, growing with the square of their number."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        """Fill lists of parameters, gradients, averages and step counts for an update."""
        has_complex = super()._init_group(group, *tensors)
        if any(map(is_sharded, tensors[0])):
            for each in tensors:
                each[:] = local(each)
        return has_complex


class Muon(AdamW):
    """AdamW, but Muon for the parameter groups that have a ``momentum``: Nesterov's, then ``orthogonalized``, then
    scaled to the root mean square ``RMS`` (Liu et al. 2025, "Muon is scalable for LLM training"), so that learning rate
    and weight decay mean what they do for AdamW. A convolution's weight is a matrix of its outputs by all the rest.

    Each matrix is orthogonalized on one of the ranks of ``world``, in bf16 on GPUs that compute in it. Of sharded
    weights, the momenta are sharded too, and a few matrices at a time are whole. Every rank calls ``step``.

    As with fused AdamW, the update is skipped on the device where ``found_inf`` is 1. Gradients are overwritten.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], world: World = ALONE, **defaults: Any):
        super().__init__([{"momentum": None, **group} for group in groups], **defaults)
        self.world = world
        self.dtype = DTYPES.get(resolve_precision("auto", world.device), torch.float32)  # of the products

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
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                step = torch.zeros((), device=parameter.device)  # of updates, as AdamW counts them
                self.state[parameter] |= {"step": step, "momentum": torch.zeros_like(parameter.grad)}
            state = self.state[parameter]
            state["step"].add_(taken)
            gradient, momentum = local([parameter.grad, state["momentum"]])
            if found is not None:  # also not of values that are not finite
                torch.where(found > 0, momentum, gradient, out=gradient)
            momentum.lerp_(gradient, 1 - group["momentum"])
            gradient.lerp_(momentum, group["momentum"])

        def updates(matrices: Sequence[Tensor]) -> list[Tensor]:
            wide = [matrix if len(matrix) <= matrix.shape[1] else matrix.T for matrix in matrices]
            by_shape: dict[Shape, list[int]] = {}
            for place, matrix in enumerate(wide):
                by_shape.setdefault((len(matrix), matrix.shape[1]), []).append(place)
            for (_, length), places in by_shape.items():
                batch = orthogonalized(torch.stack([wide[place] for place in places]))
                batch = batch * (RMS * length**0.5 * group["lr"] * taken)
                for place, update in zip(places, batch, strict=True):
                    wide[place] = update if len(update) == len(matrices[place]) else update.T
            return wide

        weights, directions = local(parameters), local(parameter.grad for parameter in parameters)
        shapes = [(len(parameter), parameter.numel() // len(parameter)) for parameter in parameters]
        like = torch.empty(0, dtype=self.dtype, device=self.world.device)
        dealing = Dealing(shapes, multiplications, Holders.of(parameters[0], self.world), like)
        for number, rows in dealing.results(lambda number: _matrix(directions[number]), updates):
            weight = weights[number]
            if group["weight_decay"]:
                weight.mul_(1 - group["lr"] * group["weight_decay"] * taken)
            weight.sub_(rows.reshape(weight.movedim(1, -1).shape).movedim(-1, 1))


def _matrix(weight: Tensor) -> Tensor:
    """The weight of a layer, [outputs, inputs, ...], as a matrix [outputs, ... · inputs]: without a copy when it is
    channels last, as convolutions are in training."""
    return weight.movedim(1, -1).flatten(1)
