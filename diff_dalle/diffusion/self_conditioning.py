"""Self-conditioning in sampling: the network sees the x_start expected at the step before (Chen et al. 2022)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ..batch import SELF_COND, Conditioning
from .samplers import Denoise, Model, Prediction


class SelfConditioned:
    """A network that is shown its latest expected x_start; nothing at first.

    That is the x_start after guidance and thresholding, of which both halves of a guided batch see the same.
    """

    def __init__(self, network: Model):
        self.network, self.latest = network, None

    latest: Tensor | None

    def __call__(self, x: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        if self.latest is not None:
            copies = [len(x) // len(self.latest)] + [1] * (x.dim() - 1)
            cond = replace(cond, extra={**cond.extra, SELF_COND: self.latest.repeat(copies)})
        return self.network(x, t, cond=cond)

    def watch(self, denoise: Denoise) -> Denoise:
        """``denoise``, whose x_start the network is shown next."""

        def watched(x: Tensor, t: int) -> Prediction:
            prediction = denoise(x, t)
            self.latest = prediction.x_start
            return prediction

        return watched


def is_self_conditioned(network: nn.Module) -> bool:
    """Whether a network reads ``SELF_COND``: it says so in an attribute."""
    return bool(getattr(network, "self_conditioned", False))
