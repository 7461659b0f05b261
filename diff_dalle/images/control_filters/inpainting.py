"""Pictures with a hole as controls: inpainting, and outpainting where the hole is all around."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config import option, settings
from ...errors import Fault
from ...randomness import Draw
from ..plugins import load_plugin
from ..smart_crop import GROUP, Saliency
from .contract import ControlFilter, Materials
from .masking import box_or_stroke_masks, salient_masks

THRESHOLD = (0.04, 0.4)  # of saliency, as in the published configurations


@settings
class InpaintParams:
    """Inpainting and outpainting"""

    p_outpaint: float = option(0.4, "probability that what is masked and what is not change places", least=0, most=1)
    saliency: str = option(
        "", "plug-in that finds what is salient in a picture, which is then masked; empty = random boxes and strokes"
    )
    threshold: tuple[float, ...] | None = option(
        None,
        "saliency above which a place is masked, drawn between LOW,HIGH; none = 0.04,0.4; without saliency it has no "
        "effect",
        was=("thresold",),
    )

    def faults(self) -> Iterator[Fault]:
        if len(self.limits) != 2 or not 0 <= self.limits[0] <= self.limits[1]:
            yield Fault.of(self, "threshold", "must be LOW,HIGH with 0 <= LOW <= HIGH")

    @property
    def limits(self) -> tuple[float, ...]:
        return THRESHOLD if self.threshold is None else self.threshold


class InpaintFilter(ControlFilter):
    """The picture, white where it is masked, and the mask: 1 = masked."""

    params = InpaintParams
    takes_masks = True
    channels = 4

    def __init__(self, params: InpaintParams, materials: Materials):
        self.config = params
        self.saliency: Saliency | None = None
        if params.saliency:
            self.saliency = load_plugin(
                GROUP,
                params.saliency,
                "controlnet_filter_params.saliency",
                "train without saliency, by random boxes and strokes",
            )
        elif params.threshold is not None:  # published configurations have one
            self.note = (
                "controlnet_filter_params has a threshold of saliency, which has no effect: without saliency, random "
                "boxes and strokes are masked"
            )

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        if masks is None:
            masks = self._drawn(pictures, draw)
        return torch.cat([pictures.float().masked_fill(masks, 1.0), masks.float()], 1)

    def _drawn(self, pictures: Tensor, draw: Draw) -> Tensor:
        if self.saliency is None:
            masks = box_or_stroke_masks(pictures.shape[2:], draw)
        else:
            low, high = self.config.limits
            thresholds = low + (high - low) * draw.uniform("control saliency threshold")
            masks = salient_masks(pictures, self.saliency, thresholds)
        outside = draw.uniform("control outpainting") < self.config.p_outpaint
        return masks ^ outside[:, None, None, None]

    def shown(self, control: Tensor, pictures: Tensor) -> Tensor:
        return control[:, :3]
