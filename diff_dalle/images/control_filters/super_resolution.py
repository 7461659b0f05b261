"""Pictures of low resolution as controls: their pixels, or the semantic latents of these."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...config import option, settings
from ...errors import Fault, InputError, named
from ...randomness import Draw
from .contract import ControlFilter, Materials


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
            remedy = f"choose another for a pixel generator; in sampling give its checkpoint with {named('semantic')}"
            rule = f"is semantic_sr, which requires a semantic encoder, but there is none: {remedy}"
            raise InputError(Fault("controlnet_filter", rule))
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
