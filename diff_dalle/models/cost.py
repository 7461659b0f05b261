"""What a network costs, found on the meta device: nothing is allocated and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

ADAMW_BYTES = 4 + 4 + 4 + 4  # weight, gradient and AdamW's two moments, each fp32


@dataclass(frozen=True)
class Cost:
    """parameters: their number. flops: of one forward pass for one image (a multiply-add counts as two).
    activation_bytes: what one image keeps for the backward pass."""

    parameters: int
    flops: int
    activation_bytes: int

    def training_bytes(self, microbatch: int, averages: int = 1) -> int:
        """Memory of training: weights, gradients, AdamW's moments, ``averages`` EMAs, a micro-batch's activations."""
        return self.parameters * (ADAMW_BYTES + 4 * averages) + microbatch * self.activation_bytes


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory behind a tensor, also on the meta device, where every data pointer is 0."""
    return tensor.untyped_storage()._cdata


def measure(model: nn.Module, call: Callable[[nn.Module], Tensor], images: int = 1) -> Cost:
    """Cost of ``call(model)``, one forward pass on ``images`` images, for a model built on the meta device."""
    own = {storage_key(parameter) for parameter in model.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}  # by storage: views of one activation count once

    def keep(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in own:
            # The tensor is held too, so that its key is not given to another.
            kept[storage_key(tensor)] = tensor, tensor.untyped_storage().nbytes()
        return tensor

    counter = FlopCounterMode(display=False)
    model.train()
    with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(model)
    saved = sum(size for _, size in kept.values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Cost(parameters, counter.get_total_flops() // images, saved // images)
