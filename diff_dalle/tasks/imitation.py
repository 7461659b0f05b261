"""Images of which a LoRA is to predict what its base predicts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Conditioning
from ..data.mixed import are_prior
from ..diffusion.diffusion_config import TrainingProcess
from ..models.adapters.lora import Adapted
from ..randomness import Draw


class Imitation:
    """The training targets of a batch of a ``MixedLoader``: those of the regularization images, and of all images whose
    caption is dropped, are the predictions of the base at the same noise and conditions (learning without forgetting,
    Li & Hoiem 2016, for diffusion models).

    Unlike images, such targets have no noise of their own: what is not forgotten yet has no gradient. Classifier-free
    guidance leads away from the prediction without caption, which is not to drift toward the new images.

    half: samples of each kind in a global batch.
    """

    def __init__(self, network: Adapted, half: int):
        self.network, self.half = network, half

    def target(
        self,
        process: TrainingProcess,
        x_start: Tensor,
        t: Tensor,
        cond: Conditioning,
        noise: Tensor,
        draw: Draw,
    ) -> Tensor:
        """[N, …] of x_start's shape, at the times t [N]."""
        target = process.target(x_start, t, noise)
        imitated = are_prior(draw.positions, self.half)
        if cond.uncaptioned is not None:
            imitated |= cond.uncaptioned
        rows = predicted_rows(imitated)
        if not len(rows):
            return target
        with torch.no_grad(), self.network.unadapted():
            x_t = process.q_sample(x_start[rows], t[rows], noise[rows])
            predicted = process.output(self.network, x_t, t[rows], {"cond": cond.select(rows)})
        torch.clear_autocast_cache()  # in older versions it keeps weights cast without gradient
        imitation = target.index_copy(0, rows, predicted.to(target.dtype))
        return torch.where(imitated.view(-1, *[1] * (target.ndim - 1)), imitation, target)


def predicted_rows(imitated: Tensor) -> Tensor:
    """The rows whose imitation is predicted: on a CPU those that need it, elsewhere all. To count them would wait for
    the device, and each number of rows would have its kernels chosen anew."""
    if imitated.device.type == "cpu":
        return imitated.nonzero()[:, 0]
    return torch.arange(len(imitated), device=imitated.device)
