"""``guided_diffusion.fp16_util``: an optimizer's step with a scaled loss, for networks that compute in fp16."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import logger

INITIAL_LOG_LOSS_SCALE = 20.0


class MixedPrecisionTrainer:
    """Backward passes and updates of a network.

    The weights are in fp32 in any case and are what the optimizer trains (``master_params``): with ``use_fp16`` the
    network computes in fp16 by its ``convert_to_fp16``, and the loss is scaled.

    model:                a network, which has ``convert_to_fp16`` if ``use_fp16``.
    fp16_scale_growth:    growth of the logarithm to base 2 of the scale with each update; a step whose gradient is not
                          finite is left out and halves the scale.
    initial_lg_loss_scale: that logarithm at the start.
    """

    def __init__(
        self,
        *,
        model: Any,
        use_fp16: bool = False,
        fp16_scale_growth: float = 1e-3,
        initial_lg_loss_scale: float = INITIAL_LOG_LOSS_SCALE,
    ):
        self.model, self.use_fp16 = model, use_fp16
        self.fp16_scale_growth, self.lg_loss_scale = fp16_scale_growth, initial_lg_loss_scale
        self.master_params: list[Tensor] = list(model.parameters())
        if use_fp16:
            model.convert_to_fp16()

    @property
    def _scale(self) -> float:
        return 2.0**self.lg_loss_scale if self.use_fp16 else 1.0

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.master_params:
            parameter.grad = None

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""
        (loss * self._scale).backward()

    def optimize(self, opt: torch.optim.Optimizer) -> bool:
        """Update the weights; False where the gradient is not finite in fp16, and nothing changes."""
        gradients = [parameter.grad for parameter in self.master_params if parameter.grad is not None]
        norm = _norm(gradients) / self._scale
        if self.use_fp16:
            logger.logkv_mean("lg_loss_scale", self.lg_loss_scale)
            if not math.isfinite(norm):
                self.lg_loss_scale -= 1
                logger.log(f"the gradient is not finite: lg_loss_scale is {self.lg_loss_scale} now")
                self.zero_grad()
                return False
            torch._foreach_mul_(gradients, 1 / self._scale)
            self.lg_loss_scale += self.fp16_scale_growth
        logger.logkv_mean("grad_norm", norm)
        logger.logkv_mean("param_norm", _norm(self.master_params))
        opt.step()
        return True

    def master_params_to_state_dict(self, master_params: Sequence[Tensor]) -> dict[str, Tensor]:
        """The network's state dict with these values of its parameters, such as averages."""
        own = list(self.model.parameters())
        present = [parameter.data for parameter in own]
        try:
            for parameter, value in zip(own, master_params, strict=True):
                parameter.data = value.data
            return {name: value.clone() for name, value in self.model.state_dict().items()}
        finally:
            for parameter, data in zip(own, present, strict=True):
                parameter.data = data

    def state_dict_to_master_params(self, state_dict: Mapping[str, Tensor]) -> list[Tensor]:
        """The inverse of ``master_params_to_state_dict``."""
        network = copy.deepcopy(self.model)
        network.load_state_dict(state_dict)
        return [parameter.detach() for parameter in network.parameters()]


@torch.no_grad()
def _norm(tensors: Iterable[Tensor]) -> float:
    norms = torch._foreach_norm([tensor.float() for tensor in tensors])
    return float(torch.stack(norms).norm()) if norms else 0.0
