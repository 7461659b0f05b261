"""The contract of a control filter: pictures → what a ControlNet steers by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from ...randomness import Draw


@dataclass(frozen=True)
class NoParams:
    """A filter without parameters"""


@dataclass(frozen=True)
class Materials:
    """What filters work with beside the pictures.

    encode: pictures [N, 3, H, W] in [-1, 1] → semantic latents [N, channels, H / stride, W / stride], by the frozen
            semantic encoder; None = there is none.
    """

    encode: Callable[[Tensor], Tensor] | None = None
    channels: int = 0
    stride: int = 1


class ControlFilter(ABC):
    """One kind of control. To add one: a subclass, and a line in ``table.FILTERS``; or, in a module of one's own,
    ``@FILTERS.register`` above it.

    params: the dataclass of its parameters, of which ``controlnet_filter_params`` has any.
    published: parameters of the published filter that its files do not give, and that differ from ours.
    takes_masks: whether it can be given masks instead of drawing them.
    channels:    of the control.
    """

    params: ClassVar[type] = NoParams
    published: ClassVar[Mapping[str, Any]] = {}
    takes_masks: ClassVar[bool] = False
    channels: int
    config: Any

    def __init__(self, params: Any, materials: Materials):
        """Raises InputError for materials or packages that are missing."""
        self.config = params

    @classmethod
    def note_on(cls, params: Any) -> str:
        """A sentence for those who use it with these parameters; empty = none."""
        return ""

    @abstractmethod
    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        """Pictures [N, 3, H, W] in [0, 1] → the control [N, channels, h, w] float32 on the same device, usually in
        [0, 1]. All random numbers are those of ``draw``. masks: see ``takes_masks``; bool [N, 1, H, W]."""

    def shown(self, control: Tensor, pictures: Tensor) -> Tensor:
        """The control for people, [N, 3, H, W] in [0, 1] of the size of the pictures that it is of."""
        colors = control if control.shape[1] == 3 else control[:, :1].expand(-1, 3, -1, -1)
        return F.interpolate(colors, pictures.shape[2:], mode="nearest").clamp(0, 1)
