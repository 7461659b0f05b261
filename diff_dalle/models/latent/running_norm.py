"""Batch norm that gives a sample the same result in any batch, micro-batch and process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOMENTUM = 0.1  # of the running statistics, after the first batches


class RunningNorm(nn.BatchNorm2d):
    """Batch norm (Ioffe & Szegedy 2015) that normalizes by the running statistics in training too.

    The batch's own statistics would make what is learned depend on how the batch is cut and dealt to processes. The
    running ones follow outside the forward pass: it gives every sample's moments, and ``update`` takes those of the
    whole batch after the step. Parameters and buffers are those of ``nn.BatchNorm2d``.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, input: Tensor, moments: list[Tensor] | None = None) -> Tensor:
        """[N, C, H, W] → the same shape. Appends to ``moments``, if given, mean and variance of each sample and
        channel, over the positions: [N, 2C] float32, without gradient."""
        if moments is not None:
            variance, mean = torch.var_mean(input.detach().float(), (2, 3), correction=0)
            moments.append(torch.cat([mean, variance], 1))
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Move the running statistics towards those of a batch: moments [N, 2C] of samples with equally many positions.

        The first ten batches are averaged evenly, so that the initial statistics do not count. Moments that are not
        finite, as in a step that the optimizer skips, change nothing.
        """
        finite = moments.isfinite().all()
        mean, variance = _of_batch(torch.where(finite, moments, 0.0))
        self.num_batches_tracked += finite
        weight = finite * (1 / self.num_batches_tracked.clamp(min=1).float()).clamp(min=MOMENTUM)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)

    @torch.no_grad()
    def of_outputs(self, moments: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [C] of what the norm now makes of a batch of inputs. moments: see ``update``."""
        mean, variance = _of_batch(moments)
        factor = (self.running_var + self.eps).rsqrt()
        mean = (mean - self.running_mean) * factor
        if self.affine:
            mean, factor = torch.addcmul(self.bias, mean, self.weight), factor * self.weight
        return mean, variance * factor.square()


def _of_batch(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [C] over samples with equally many positions, of their moments [N, 2C]."""
    means, variances = moments.chunk(2, dim=1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)
