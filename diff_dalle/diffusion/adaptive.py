"""Training that follows its own losses by log-SNR: an adaptive loss weight, and an adaptive schedule.

Both are functions of the running loss in buckets of log-SNR. That is state: a task passes it the losses of every step,
of all ranks in order of position, and saves it with its own state (``Task.observe``, ``extra_state``). It follows from
the losses alone, so it is the same on all ranks and after a resume.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .log_snr_schedules import interpolate

ADAPTIVE = "adaptive"  # the name of both in settings
DECAY = 0.99  # share of a bucket's running loss that remains after another loss
_LIMIT = 10.0  # buckets lie in ±10
_WEIGHT_EDGES, _SCHEDULE_BUCKETS = 299, 100
_LEAST_SHARE = 1e-6  # of the distribution in one bucket, so that quantiles stay defined


class Adaptive:
    """What follows the running loss in each bucket of log-SNR, ``values`` [B]; 1 before the first loss.

    edges: [B − 1], increasing, between the B buckets; the first and the last are unbounded.
    """

    def __init__(self, edges: Tensor):
        self._edges = edges.double()
        self.values = torch.ones(len(edges) + 1, dtype=torch.float64)

    def to(self, like: Tensor) -> None:
        """Move to the device of ``like``, in double precision where there is one."""
        if self.values.device != like.device:
            dtype = torch.float32 if like.device.type == "mps" else torch.float64
            self.values, self._edges = (each.to(like.device, dtype) for each in (self.values, self._edges))

    def at(self, log_snr: Tensor) -> Tensor:
        """[N] the bucket of each log-SNR [N]."""
        self.to(log_snr)
        return torch.bucketize(log_snr.to(self._edges.dtype), self._edges)

    @torch.no_grad()
    def update(self, log_snr: Tensor, losses: Tensor) -> None:
        """Take losses [N] at log_snr [N] into account, one after the other: bucket ← .99 bucket + .01 loss.

        Losses that are not finite are discarded: they would corrupt a bucket permanently.
        """
        bucket = self.at(log_snr)
        finite = losses.isfinite()
        members = (bucket[:, None] == torch.arange(len(self.values), device=bucket.device)) & finite[:, None]  # [N, B]
        # Sums over a dense axis, not scattered ones, whose order and so rounding may differ between GPUs.
        counts = members.long().flip(0).cumsum(0).flip(0)  # this loss and the later ones of its bucket
        shares = torch.where(members, (1 - DECAY) * DECAY ** (counts - 1).to(self.values.dtype), 0.0)
        news = (shares * losses.nan_to_num(0.0, 0.0, 0.0).to(self.values.dtype)[:, None]).sum(0)
        self.values = self.values * DECAY ** counts[0].to(self.values.dtype) + news

    def state(self) -> Tensor:
        """[B] float64 on the CPU."""
        return self.values.double().cpu()

    def load(self, state: Tensor) -> None:
        self.values = state.to(self.values)


class AdaptiveWeight(Adaptive):
    """1 / the running loss around a log-SNR, so that all noise levels contribute equally. 300 buckets in ±10."""

    def __init__(self) -> None:
        super().__init__(torch.linspace(-_LIMIT, _LIMIT, _WEIGHT_EDGES, dtype=torch.float64))

    def __call__(self, log_snr: Tensor) -> Tensor:
        bucket = self.at(log_snr)
        return (1 / self.values[bucket]).to(log_snr.dtype)


class AdaptiveSchedule(Adaptive):
    """Log-SNR from 10 to −10, drawn in proportion to the running loss: quantiles of that distribution, which is uniform
    in the first step and in each of the 100 buckets."""

    def __init__(self) -> None:
        super().__init__(torch.linspace(-_LIMIT, _LIMIT, _SCHEDULE_BUCKETS + 1, dtype=torch.float64)[1:-1])

    def __call__(self, t: Tensor) -> Tensor:
        self.to(t)
        values = self.values.to(t.dtype).flip(0)  # from clean to noisy
        share = (values / values.sum()).clamp(min=_LEAST_SHARE)
        knots = torch.cat([torch.zeros_like(share[:1]), share.cumsum(0)])
        edges = torch.linspace(_LIMIT, -_LIMIT, _SCHEDULE_BUCKETS + 1, dtype=t.dtype, device=t.device)
        return interpolate(t, knots / knots[-1], edges)
