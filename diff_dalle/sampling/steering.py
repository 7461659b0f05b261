"""A ControlNet beside the network of a stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checkpoints.kinds import KINDS, find_kind
from ..checkpoints.loading import SavedNetwork, open_networks
from ..config import InputError, differences, named, to_dict
from ..diffusion.sampling import seeds_draw
from ..embeddings.contract import weights_digest
from ..images.control_filters.contract import ControlFilter, Materials, as_control
from ..images.control_filters.table import ControlConfig
from ..images.signal import LatentSignal, Signal
from ..models.adapters.controlnet import Controlled, ControlNet
from ..models.precision import for_inference
from .control import Control


class Steering:
    """A ControlNet that steers the network of a stage.

    path:      its checkpoint.
    base:      that of the network. accept_changed_base: also with other weights than those that it was trained for.
    precision: fp32, bf16 or fp16.
    keep:      keep the weights in memory after use.

    Raises InputError for a checkpoint of anything else, and for one for another network.
    """

    def __init__(
        self,
        path: str,
        base: SavedNetwork,
        device: torch.device,
        precision: str = "fp32",
        keep: bool = True,
        accept_changed_base: bool = False,
    ):
        (self.saved,) = open_networks(path, tuple(kind for kind in KINDS if find_kind(kind).role == "controlnet"))
        self.base, self.settings = base, self.saved.settings
        self.device, self.precision, self.keep = device, precision, keep
        required, found = self.settings.of, base.settings.name
        if required != found:
            raise InputError(f"{path} is a ControlNet for a {required}, but {base.path} holds a {found}")
        own, given = self.settings.model, base.settings.model
        if changed := differences(to_dict(own), to_dict(given), type(own)):
            raise InputError(
                f"{path} is a ControlNet for a {required} with other settings than {base.path}: {changed[0]}; give the "
                "base of its training"
            )
        if not accept_changed_base:
            self._check_base()
        self._network: nn.Module | None = None
        self._filter: ControlFilter | None = None

    def _check_base(self) -> None:
        known, found = self.settings.base.identity, weights_digest(self.base.weights())
        if known and known != found:  # files of other projects do not say it
            raise InputError(
                f"{self.saved.path} is a ControlNet for the weights {known}, but those of {self.base.path} are "
                f"{found}: give the base of its training, or accept this one by {named('accept_changed_base')}"
            )

    def check(self, control: Control, size: tuple[int, int], signal: Signal) -> None:
        """InputError for pictures that cannot control samples of this size."""
        pixels = (signal.scale * size[0], signal.scale * size[1])
        for i in range(len(control.images)):  # one at a time to save memory
            control.masked([i], pixels)
            control.pictures([i], pixels)
        self.controls(control, [0], size, signal, [0])

    def controls(
        self,
        control: Control,
        index: Sequence[int],
        size: tuple[int, int],
        signal: Signal,
        seeds: Sequence[int],
        stage: int = 0,
    ) -> Tensor:
        """The controls of the samples with these indices and seeds [N, channels, h, w], on the CPU.

        size, signal: height, width and signal of the samples. stage: its index in the cascade.
        """
        pixels = (signal.scale * size[0], signal.scale * size[1])
        pictures, masks = control.pictures(index, pixels), control.masked(index, pixels)
        config: ControlConfig = self.settings.control
        if control.ready:
            return as_control(pictures, config.channels)
        control_filter = self.control_filter(signal)
        if masks is not None and not control_filter.takes_masks:
            raise InputError(
                f"a mask ({named('control_mask')}) is given, but the ControlNet's filter {config.controlnet_filter} "
                "has none: leave it out"
            )
        return control_filter(pictures, seeds_draw(seeds, stage, torch.device("cpu")), masks)

    def control_filter(self, signal: Signal) -> ControlFilter:
        """What makes the controls of pictures, for samples of this signal. InputError for what it lacks."""
        if self._filter is None:
            self._filter = self.settings.control.create(_materials(signal))
        return self._filter

    def around(self, network: nn.Module, scale: float) -> Controlled:
        """The stage's network, steered."""
        found = self._network or for_inference(self.saved.load(self.device), self.precision)
        self._network = found if self.keep else None
        assert isinstance(found, ControlNet)
        return Controlled(network, found, scale)


def _materials(signal: Signal) -> Materials:
    if isinstance(signal, LatentSignal) and signal.encode is not None:
        return Materials(signal.encode, signal.channels, signal.scale)
    return Materials()
