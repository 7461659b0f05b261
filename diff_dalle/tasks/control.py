"""Training a ControlNet: the task of its base, with controls of the samples' images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..batch import Batch, Conditioning
from ..images.control_filters.contract import ControlFilter
from ..models.adapters.controlnet import Controlled, ControlNet
from ..randomness import Draw
from ..training.task import Task
from .denoising import DenoisingTask
from .latent import StageCTask

BASE = "base"  # the companion that is steered
SEED = 20230210  # of the random numbers of controls outside training


def control_of(control_filter: ControlFilter, batch: Batch, draw: Draw | None = None) -> Tensor:
    """The controls of a batch [N, channels, h, w] float32: those that the data holds, else what the filter makes of the
    images. draw: None = always the same random numbers at a position."""
    if batch.cond.control is not None:
        return batch.cond.control
    draw = draw or Draw(SEED, batch.index, batch.images.device)
    with torch.no_grad():
        return control_filter(pictures_of(batch), draw).float()


def pictures_of(batch: Batch) -> Tensor:
    """The images as filters see them: [N, 3, H, W] in [0, 1]."""
    return ((batch.images + 1) / 2).expand(-1, 3, -1, -1)


class ControlTask(Task):
    """What is the same for all bases; comes before the base's task in the order of bases. ``model`` is the ControlNet;
    the base is the companion ``BASE``.

    control_filter: makes the controls; set before use.
    """

    control_filter: ControlFilter

    @property
    def denoiser(self) -> nn.Module:
        return Controlled(self.companions[BASE], cast(ControlNet, self.model))

    def condition(self, batch: Batch, draw: Draw | None = None) -> Conditioning:
        cond: Conditioning = cast(Any, super()).condition(batch, draw)
        return replace(cond, control=control_of(self.control_filter, batch, draw))


class ControlledDenoisingTask(ControlTask, DenoisingTask):
    """A ControlNet of a generator."""

    def swapped(self, cond: Conditioning) -> dict[str, tuple[Conditioning, Tensor]]:
        control = cast(Tensor, cond.control)
        others = control.roll(1, 0)
        differs = torch.ne(others, control).flatten(1).any(1)
        return {**super().swapped(cond), "control": (replace(cond, control=others), differs)}


class ControlledStageCTask(ControlTask, StageCTask):
    """A ControlNet of stage C."""

    def other_conditions(self, cond: Conditioning, batch: Batch) -> dict[str, Conditioning]:
        swapped = replace(cond, control=cast(Tensor, cond.control).roll(1, 0))
        return {**super().other_conditions(cond, batch), "control_swap": swapped}

    def pictures(self, batch: Batch, cond: Conditioning) -> dict[str, Tensor]:
        shown = self.control_filter.shown(cast(Tensor, cond.control), pictures_of(batch))
        return {**super().pictures(batch, cond), "control": 2 * shown - 1}
