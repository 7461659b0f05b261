"""The contract of a control filter: pictures → what a ControlNet steers by.

And the filters that give pictures as controls: the training pictures themselves, ready-made ones beside them, and those
of low resolution, as pixels or as the semantic latents of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from ...config import Fault, InputError, named, option, settings
from ...config.bounds import MAX_WIDTH
from ...randomness import Draw
from ..decode import IMAGE_KINDS


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


class PictureFilter(ControlFilter):
    """The picture itself."""

    channels = 3

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        return pictures.float()


@settings
class ReadyParams:
    """Ready-made controls"""

    member: str = option(
        "cond.png", "extension of the member of each sample that holds its control: depth, poses, a drawing, …"
    )
    channels: int = option(3, "channels of the control: 3 = RGB, 1 = gray", most=MAX_WIDTH)

    def faults(self) -> Iterator[Fault]:
        if self.channels not in (1, 3):
            yield Fault.of(self, "channels", "must be 3 (RGB) or 1 (gray)")
        name, _, kind = self.member.rpartition(".")
        if kind.lower() not in IMAGE_KINDS or not name or "/" in name:
            yield Fault.of(
                self,
                "member",
                "must be an extension with two parts, such as cond.png or depth.jpg: a picture beside the image in the "
                "shard, since a path in its json is not followed",
            )


class ReadyFilter(ControlFilter):
    """Controls from the data. In sampling a picture is one already."""

    params = ReadyParams

    def __init__(self, params: ReadyParams, materials: Materials):
        self.member, self.channels = params.member, params.channels

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        return as_control(pictures, self.channels)


def as_control(pictures: Tensor, channels: int) -> Tensor:
    """Pictures [N, 3, H, W] in [0, 1] as ready-made controls with 3 channels, or with 1: their mean."""
    if channels not in (1, 3):
        raise InputError(
            f"a picture can be a ready-made control of 1 or 3 channels, but the ControlNet takes {channels}: leave "
            f"{named('control_ready')} out"
        )
    return pictures.float() if channels == 3 else pictures.float().mean(1, keepdim=True)


@settings
class PixelatedParams:
    """Low resolution"""

    scale: float = option(0.25, "resolution relative to the picture's", was=("scale_factor",), above=0, below=1)


@settings
class SemanticPixelatedParams(PixelatedParams):
    """Low resolution"""

    scale: float = option(0.5, "resolution relative to the picture's", was=("scale_factor",), above=0, below=1)


class PixelatedFilter(ControlFilter):
    """The picture in coarse pixels."""

    params = PixelatedParams
    config: PixelatedParams
    channels = 3

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        return F.interpolate(_reduced(pictures, self.config.scale), pictures.shape[2:], mode="nearest")


class SemanticPixelatedFilter(ControlFilter):
    """The semantic latents of the picture in coarse pixels, at the resolution of those of the picture."""

    params = SemanticPixelatedParams
    config: SemanticPixelatedParams

    def __init__(self, params: SemanticPixelatedParams, materials: Materials):
        if materials.encode is None:
            remedy = f"choose another for a pixel generator; in sampling give its checkpoint with {named('semantic')}"
            rule = f"is semantic_sr, which requires a semantic encoder, but there is none: {remedy}"
            raise InputError(Fault("controlnet_filter", rule))
        super().__init__(params, materials)
        self.encode, self.channels, self.stride = materials.encode, materials.channels, materials.stride

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        reduced = _reduced(pictures, self.config.scale, self.stride)
        latents = self.encode(2 * reduced - 1)
        return F.interpolate(latents, [length // self.stride for length in pictures.shape[2:]], mode="nearest")

    def shown(self, control: Tensor, pictures: Tensor) -> Tensor:
        return F.interpolate(_reduced(pictures, self.config.scale, self.stride), pictures.shape[2:], mode="nearest")


def _reduced(pictures: Tensor, scale: float, multiple: int = 1) -> Tensor:
    """Every n-th pixel; both sides are multiples of ``multiple``, at least one."""
    size = [max(1, round(length * scale / multiple)) * multiple for length in pictures.shape[2:]]
    return F.interpolate(pictures, size, mode="nearest")
