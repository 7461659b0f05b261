"""The networks of a run as a plan sees them: measured on the meta device, without allocation."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from ...checkpoints.kind import NetworkKind
from ...checkpoints.kinds import find_kind
from ...distributed.devices import without_values
from ...models.cost import count_training, half_peak_bytes, peak_bytes
from ...models.sharded_cost import Shapes, shapes_of
from ...training.optim import decayed
from ...training.optim_config import OptimConfig
from ..training import TrainingRun

IMAGES = 4  # of the passes from which FLOPs and estimates of memory follow


@dataclass(frozen=True)
class PlannedNetwork:
    """One network that a run trains.

    trainee: its name among several. optim: its optimizer. half: whether it is trained in bf16 (or fp16), else in fp32.
    """

    settings: NetworkKind
    vocab_size: int
    trainee: str
    optim: OptimConfig
    half: bool

    @functools.cached_property
    def probe(self):
        return self.settings.probe(self.trainee)

    def build(self, checkpoint: bool) -> nn.Module:
        """On torch's default device. checkpoint: with activation checkpointing."""
        network = self.probe.with_checkpoint(checkpoint).build(self.vocab_size, self.trainee)
        for weight in (each for each in network.parameters() if each.dim() == 4):
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)  # as in training
        return network

    @functools.cached_property
    def _empty(self) -> nn.Module:
        with without_values():
            return self.build(False)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._empty.parameters())

    @functools.cached_property
    def shapes(self) -> list[Shapes]:
        """See ``shapes_of``."""
        return shapes_of(self._empty)

    @functools.cached_property
    def _matrices(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters that Muon orthogonalizes."""
        if self.optim.optimizer != "muon":
            return []
        known = decayed(self._empty)
        return [tuple(each.shape) for each in self._empty.parameters() if id(each) in known]

    @property
    def optimizer_bytes(self) -> int:
        """AdamW's two moments, or Muon's momentum, in fp32."""
        return 4 * (2 * self.parameters - sum(map(prod, self._matrices)))

    @property
    def update_bytes(self) -> int:
        """What an update needs for its own time: nothing for fused AdamW; for Muon a copy of all its matrices, and of
        those of the most numerous shape their stack, three products of its size, and five Gram matrices."""
        wide = Counter(tuple(sorted((shape[0], prod(shape[1:])))) for shape in self._matrices)
        largest = max((count * (4 * m * n + 5 * m * m) for (m, n), count in wide.items()), default=0)
        return 4 * (sum(map(prod, self._matrices)) + largest)

    @functools.cache  # noqa: B019, a plan is made once
    def _work(self, checkpoint: bool) -> tuple[int, int]:
        with without_values():
            network, side = self.build(checkpoint), self.probe.sizes[1]
            return count_training(network, lambda net: self.probe.forward(net, IMAGES, side))

    def flops(self, checkpoint: bool) -> int:
        """FLOPs of forward and backward pass over one image, with what checkpointing computes twice."""
        return self._work(checkpoint)[0] // IMAGES

    def operations(self, checkpoint: bool) -> int:
        """Operations of forward and backward pass over a micro-batch of any size."""
        return self._work(checkpoint)[1]

    @functools.cache  # noqa: B019
    def peak(self, images: int, checkpoint: bool, accumulates: bool) -> int:
        """Peak bytes of forward and backward pass over so many images, see ``peak_bytes``."""
        side = self.probe.sizes[1]
        if self.half:
            return half_peak_bytes(
                lambda: self.build(checkpoint),
                lambda network, count: self.probe.forward(network, count, side),
                images,
                accumulates,
            )
        with without_values():
            network = self.build(checkpoint)
            return peak_bytes(network, lambda net: self.probe.forward(net, images, side), accumulates)

    def estimated_peak(self, images: int, checkpoint: bool, accumulates: bool) -> int:
        """``peak``, along the line through two small numbers of images: quick, and too low where weights dominate
        these."""
        low, high = (self.peak(n, checkpoint, accumulates) for n in (IMAGES, 2 * IMAGES))
        return low + (high - low) * (images - IMAGES) // IMAGES


def networks_of(run: TrainingRun, half: bool) -> list[PlannedNetwork]:
    """The networks that a run trains."""
    tokenizer, settings = run.build_tokenizer(), find_kind(run.network_kind).of_run(run)
    vocab_size = tokenizer.vocab_size if tokenizer else 0
    names = settings.trainees
    return [PlannedNetwork(settings, vocab_size, name, run.optims[i], half) for i, name in enumerate(names)]
