"""ControlNets (Zhang et al. 2023): networks that steer a frozen denoiser by a control, such as a picture's edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from ...batch import CONTROL_HINT, Conditioning
from ...config import Fault, InputError, quantity


class ControlNet(nn.Module, ABC):
    """Makes what is added to the feature maps of a base network: 0 at initialization.

    control_channels: channels of the control.
    """

    def __init__(self, control_channels: int):
        super().__init__()
        if control_channels < 1:
            raise InputError(Fault("control_channels", "must be at least 1", control_channels))
        self.control_channels = control_channels

    def encode(self, control: Tensor) -> Tensor:
        """The control [N, control_channels, H, W] in [0, 1] → the hint [N, …], which depends neither on x nor on t:
        sampling makes it once. InputError for another number of channels."""
        if control.dim() != 4 or control.shape[1] != self.control_channels:
            raise InputError(
                f"the control has the shape {tuple(control.shape)}, but the ControlNet takes "
                f"{quantity(self.control_channels, 'channel')}: give controls of the filter that it was trained with"
            )
        return self.encoded(control)

    @abstractmethod
    def encoded(self, control: Tensor) -> Tensor:
        """``encode`` without the check."""

    @abstractmethod
    def forward(self, hint: Tensor, x: Tensor, t: Tensor, cond: Conditioning) -> list[Tensor | None]:
        """The ``control`` argument of the base for the same x, t and cond, whose text is encoded."""

    @abstractmethod
    def start_from(self, base: nn.Module) -> None:
        """Copy what the initial weights are to share with the base's."""


class Controlled(nn.Module):
    """A denoiser steered by a ControlNet, called as the denoiser is. Samples without ``cond.control`` are the base's
    own; with an untrained ControlNet all of them are, bit for bit.

    base:  called as ``base(x, t, cond, control=…)``. It is not changed: who trains the ControlNet freezes it.
    scale: factor of what the ControlNet adds.
    """

    def __init__(self, base: nn.Module, controlnet: ControlNet, scale: float = 1.0):
        super().__init__()
        self.base, self.controlnet, self.scale = base, controlnet, scale

    @property
    def config(self) -> Any:
        """The base's."""
        return self.base.config

    def encode_text(self, cond: Conditioning) -> Conditioning:
        """``cond`` with its text encoded by the base, and with the hint in place of the control: what sampling computes
        once."""
        cond = cast("Callable[[Conditioning], Conditioning]", self.base.encode_text)(cond)
        if cond.control is None:
            return cond
        hint = self.controlnet.encode(cond.control)
        return replace(cond, control=None, extra={**cond.extra, CONTROL_HINT: hint})

    def forward(self, x: Tensor, t: Tensor, cond: Conditioning | None = None) -> Tensor:
        cond = self.encode_text(cond or Conditioning())
        hint = cond.extra.get(CONTROL_HINT)
        if hint is None:
            return self.base(x, t, cond)
        control = self.controlnet(hint, x, t, cond)
        if self.scale != 1:
            control = [None if each is None else self.scale * each for each in control]
        return self.base(x, t, cond, control=control)
