"""Pictures that are controls as they are: the training pictures themselves, or ready-made ones beside them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...config import option, settings
from ...errors import Fault, InputError, named
from ...randomness import Draw
from ..decode import IMAGE_KINDS
from .contract import ControlFilter, Materials


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
    channels: int = option(3, "channels of the control: 3 = RGB, 1 = gray")

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
