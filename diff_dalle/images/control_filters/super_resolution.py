"""Pictures of low resolution as controls: their pixels, or the semantic latents of these."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ...config import option
from ...errors import InputError
from ...randomness import Draw
from .contract import ControlFilter, Materials


@dataclass(frozen=True)
class PixelatedParams:
    """Low resolution"""

    scale: float = option(0.25, "resolution relative to the picture's", was=("scale_factor",))

    def __post_init__(self):
        if not 0 < self.scale < 1:
            raise InputError(f"scale is {self.scale:g}, but must lie between 0 and 1")


@dataclass(frozen=True)
class SemanticPixelatedParams(PixelatedParams):
    """Low resolution"""

    scale: float = option(0.5, "resolution relative to the picture's", was=("scale_factor",))


class PixelatedFilter(ControlFilter):
    """The picture in coarse pixels."""

    params = PixelatedParams
    channels = 3

    def __init__(self, params: PixelatedParams, materials: Materials):
        self.config = params

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        return F.interpolate(_reduced(pictures, self.config.scale), pictures.shape[2:], mode="nearest")


class SemanticPixelatedFilter(ControlFilter):
    """The semantic latents of the picture in coarse pixels, at the resolution of those of the picture."""

    params = SemanticPixelatedParams

    def __init__(self, params: SemanticPixelatedParams, materials: Materials):
        if materials.encode is None:
            raise InputError(
                "controlnet_filter is semantic_sr, which requires a semantic encoder, but there is none: choose "
                "another for a pixel generator; in sampling give its checkpoint with --semantic"
            )
        self.config = params
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
