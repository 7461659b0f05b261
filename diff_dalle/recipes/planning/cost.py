"""What one network takes: parameters, FLOPs and memory, found without allocation."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from ...checkpoints.kind import NetworkKind, Probe
from ...checkpoints.kinds import find_kind
from ...config import InputError
from ...distributed.dealing import LIMIT, Shape, dealt
from ...distributed.devices import without_values
from ...models.cost import count_flops, count_training, half_peak_bytes, peak_bytes
from ...models.units import parts_of
from ...training.muon import multiplications
from ...training.optim import decayed
from ...training.settings import OptimConfig
from ..recipe import Recipe

IMAGES = 64  # measured together: some memory of a backward pass does not grow with the number of images
ADAMW_BYTES = 4 + 4 + 4 + 4  # per parameter: weight, gradient and AdamW's two moments, each fp32
FEW = 4  # images of the passes from which estimates of memory follow

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HalfCost:
    """Memory of a network under autocast in bf16.

    activation_bytes: peak per image, as ``NetworkCost.activation_bytes``.
    copy_bytes:       of the weights in bf16, which exist beside those in fp32 until the backward pass; the same for all
                      numbers of images.
    """

    activation_bytes: int
    copy_bytes: int


@dataclass(frozen=True)
class NetworkCost:
    """The cost of a network, each part of which is found when it is asked for, once for all equal networks.

    trainee: its name among several. optim: its optimizer. half: whether it is trained in bf16 (or fp16), else in fp32.
    """

    settings: NetworkKind
    vocab_size: int = 0
    trainee: str = ""
    optim: OptimConfig = field(default_factory=OptimConfig)
    half: bool = False

    @functools.cached_property
    def probe(self) -> Probe:
        return self.settings.probe(self.trainee)

    @property
    def size(self) -> int:
        """Width and height in pixels of whole images, on which the FLOPs of a forward pass are counted."""
        return self.probe.sizes[0]

    @property
    def trained(self) -> int:
        """Width and height in pixels of the images or crops it is trained on."""
        return self.probe.sizes[1]

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

    @functools.cache  # noqa: B019, a few networks
    def flops(self, side: int) -> int:
        """FLOPs of a forward pass over one image of so many pixels a side; a multiply-add counts as two."""
        with without_values():
            return count_flops(self._empty, lambda network: self.probe.forward(network, 1, side))

    @functools.cache  # noqa: B019
    def _training(self, checkpoint: bool) -> tuple[int, int]:
        with without_values():
            network = self.build(checkpoint)
            return count_training(network, lambda net: self.probe.forward(net, FEW, self.trained))

    def training_flops(self, checkpoint: bool) -> int:
        """FLOPs of forward and backward pass over one image, with what checkpointing computes twice."""
        return self._training(checkpoint)[0] // FEW

    def operations(self, checkpoint: bool) -> int:
        """Operations of forward and backward pass over a micro-batch of any size."""
        return self._training(checkpoint)[1]

    # --------------------------------------------------------------------------------------------------------- memory

    @functools.cache  # noqa: B019
    def _peak(self, images: int, checkpoint: bool, accumulates: bool, half: bool) -> int:
        def build() -> nn.Module:
            return self.build(checkpoint)

        def forward(network: nn.Module, count: int) -> torch.Tensor:
            return self.probe.forward(network, count, self.trained)

        if half:
            return half_peak_bytes(build, forward, images, accumulates)
        with without_values():
            return peak_bytes(build(), lambda network: forward(network, images), accumulates)

    def peak(self, images: int, checkpoint: bool, accumulates: bool) -> int:
        """Peak bytes of forward and backward pass over so many images, see ``peak_bytes``."""
        return self._peak(images, checkpoint, accumulates, self.half)

    def estimated_peak(self, images: int, checkpoint: bool, accumulates: bool) -> int:
        """``peak``, along the line through two small numbers of images: quick, and too low where weights dominate
        these."""
        low, high = (self.peak(n, checkpoint, accumulates) for n in (FEW, 2 * FEW))
        return low + (high - low) * (images - FEW) // FEW

    def activation_bytes(self, checkpoint: bool | None = None) -> int:
        """Peak memory per image of many, or per crop when trained on crops, during forward and backward pass in fp32;
        without the workspace of a device's libraries. checkpoint: None = as set."""
        on = self.probe.checkpointed if checkpoint is None else checkpoint
        return self._peak(IMAGES, on, True, False) // IMAGES

    def half_cost(self, checkpoint: bool) -> HalfCost:
        least, most = (self._peak(count, checkpoint, True, True) for count in (IMAGES, 2 * IMAGES))
        per_image = (most - least) // IMAGES
        return HalfCost(per_image, max(0, least - IMAGES * per_image))

    def training_bytes(self, microbatch: int, checkpoint: bool | None = None, emas: int | None = None) -> int:
        """Memory of training in fp32: weights, gradients, AdamW's moments, sets of EMA weights, and the activations of
        one micro-batch. checkpoint, emas: None = as set."""
        sets = len(self.optim.ema_rate) if emas is None else emas
        held = self.parameters * (ADAMW_BYTES + 4 * sets)
        return held + microbatch * self.activation_bytes(checkpoint)

    @functools.cached_property
    def matrices(self) -> tuple[Shape, ...]:
        """The shapes of the matrices that Muon orthogonalizes."""
        if self.optim.optimizer != "muon":
            return ()
        known = decayed(self._empty)
        weights = (each for each in self._empty.parameters() if id(each) in known)
        return tuple((len(each), each.numel() // len(each)) for each in weights)

    @property
    def optimizer_bytes(self) -> int:
        """AdamW's two moments, or Muon's momentum, in fp32."""
        return 4 * (2 * self.parameters - sum(map(prod, self.matrices)))

    def update_bytes(self, copies: int = 1, shares: int = 1) -> int:
        """What an update needs for its own time: nothing for fused AdamW; for Muon, in the turn that needs most, the
        matrices of a hand, and of those of its most numerous shape their stack, two products of its size, and five Gram
        matrices; on several processes the results, and those of the others. In fp32, as on CPUs.

        copies, shares: of the weights, on as many processes as both say.
        """
        most = 0
        for turn in dealt(self.matrices, multiplications, copies * shares, LIMIT):
            for hand in turn:
                wide = Counter(tuple(sorted(self.matrices[number])) for number in hand)
                largest = max((count * (3 * m * n + 5 * m * m) for (m, n), count in wide.items()), default=0)
                held = sum(prod(self.matrices[number]) for number in hand)
                exchanged = held * (2 + copies) if copies * shares > 1 else 0
                most = max(most, held + largest, held + exchanged)
        return 4 * most


def shapes_of(network: nn.Module) -> list[Shapes]:
    """The shapes of the parameters of each block that is gathered by itself, and at the end those of the rest; none for
    a network that cannot be sharded."""
    try:
        blocks = parts_of(network, None).blocks
    except InputError:
        return []
    found, seen = [], set[int]()
    for module in (*blocks, network):
        own = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, own))
        found.append(tuple(tuple(each.shape) for each in own))
    return found


def networks_of(recipe: Recipe, half: bool = False) -> list[NetworkCost]:
    """The networks of a training run."""
    tokenizer = recipe.tokenizer()
    vocab_size = tokenizer.vocab_size if tokenizer else 0
    return [NetworkCost(recipe.network, vocab_size, name, optim, half) for name, optim in recipe.optims.items()]


def networks_of_file(content: Mapping[str, Any]) -> list[NetworkCost]:
    """The networks in a checkpoint file. content: as ``load_file`` returns it."""
    settings: NetworkKind = find_kind(content["kind"]).read(content["config"])
    embeddings = (len(value) for name, value in content["state"].items() if name.endswith("token_emb.weight"))
    vocab_size = next(embeddings, 0)  # so that the tokenizer's file is not needed; 0 = it reads no text
    names = (content["trainee"],) if content["trainee"] else settings.trainees
    return [NetworkCost(settings, vocab_size, name) for name in names]
