"""Pictures with a hole as controls: inpainting, and outpainting where the hole is all around. Holes are random boxes
and strokes, or what is salient in a picture.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...config import Fault, option, settings
from ...randomness import Draw
from ..plugins import load_plugin
from ..transforms import GROUP, SIDE, Saliency
from .contract import ControlFilter, Materials

MAX_BOXES, BOX_SIDES = 2, (0.25, 0.6)  # of a picture; sides as fractions of its
MAX_STROKES, STROKE_CORNERS, STROKE_WIDTHS = 3, 4, (0.08, 0.2)  # widths as fractions of the shorter side
BLUR = 21.5 / 768  # standard deviation relative to the shorter side, as in the published inpainting of 768 pixels
Uniform = Callable[[str], Tensor]
NUMBERS = (
    *("kind", "boxes", "strokes"),
    *(f"box {i} {what}" for i in range(MAX_BOXES) for what in ("height", "width", "row", "column")),
    *(f"stroke {i} width" for i in range(MAX_STROKES)),
    *(f"stroke {i} row {j}" for i in range(MAX_STROKES) for j in range(STROKE_CORNERS)),
    *(f"stroke {i} column {j}" for i in range(MAX_STROKES) for j in range(STROKE_CORNERS)),
)


def box_or_stroke_masks(size: Sequence[int], draw: Draw) -> Tensor:
    """Masks bool [N, 1, H, W], True = masked: in half of the samples one or two boxes, in the others up to three
    strokes, each of three connected lines."""

    numbers = draw.uniforms([f"control mask {name}" for name in NUMBERS])

    def uniform(name: str) -> Tensor:
        return numbers[f"control mask {name}"].float()[:, None, None]

    height, width = size
    rows = (torch.arange(height, device=draw.device)[:, None] + 0.5) / height
    columns = (torch.arange(width, device=draw.device)[None] + 0.5) / width
    boxes, strokes = _boxes(rows, columns, uniform), _strokes(rows, columns, size, uniform)
    return torch.where(uniform("kind") < 0.5, boxes, strokes)[:, None]


def _between(uniform: Tensor, low: float, high: float) -> Tensor:
    return low + uniform * (high - low)


def _boxes(rows: Tensor, columns: Tensor, uniform: Uniform) -> Tensor:
    masked, count = torch.zeros((), dtype=torch.bool, device=rows.device), 1 + MAX_BOXES * uniform("boxes") // 1
    for i in range(MAX_BOXES):
        tall, wide = (_between(uniform(f"box {i} {side}"), *BOX_SIDES) for side in ("height", "width"))
        row, column = uniform(f"box {i} row"), uniform(f"box {i} column")
        inside = ((rows - row).abs() < tall / 2) & ((columns - column).abs() < wide / 2)
        masked = masked | (inside & (count > i))
    return masked


def _strokes(rows: Tensor, columns: Tensor, size: Sequence[int], uniform: Uniform) -> Tensor:
    down, across = (length / min(size) for length in size)  # distances in units of the shorter side
    masked, count = torch.zeros((), dtype=torch.bool, device=rows.device), 1 + MAX_STROKES * uniform("strokes") // 1
    for i in range(MAX_STROKES):
        radius = _between(uniform(f"stroke {i} width"), *STROKE_WIDTHS) / 2
        corners = [
            (down * uniform(f"stroke {i} row {j}"), across * uniform(f"stroke {i} column {j}"))
            for j in range(STROKE_CORNERS)
        ]
        for (y0, x0), (y1, x1) in itertools.pairwise(corners):
            dy, dx = y1 - y0, x1 - x0
            from_y, from_x = down * rows - y0, across * columns - x0
            along = ((from_y * dy + from_x * dx) / (dy**2 + dx**2).clamp(min=1e-12)).clamp(0, 1)
            distance = (from_y - along * dy) ** 2 + (from_x - along * dx) ** 2
            masked = masked | ((distance < radius**2) & (count > i))
    return masked


def salient_masks(pictures: Tensor, saliency: Saliency, thresholds: Tensor) -> Tensor:
    """Where the saliency of each picture, in [0, 1], is above its threshold [N], smoothed: bool [N, 1, H, W]."""
    height, width = pictures.shape[2:]
    maps = []
    for picture, threshold in zip(pictures, thresholds.tolist(), strict=True):
        scale = SIDE / min(height, width)
        small = F.interpolate(
            picture[None], [max(SIDE, round(length * scale)) for length in (height, width)], mode="bilinear"
        )
        pixels = (255 * small[0]).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
        found = torch.from_numpy(np.asarray(saliency(pixels), dtype=np.float32)) > threshold
        maps.append(F.interpolate(found.float()[None, None], (height, width), mode="nearest"))
    return _blurred(torch.cat(maps).to(pictures.device), BLUR * min(height, width)) > 0.5


def _blurred(maps: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of [N, 1, H, W]; the border is repeated."""
    radius = min(math.ceil(3 * sigma), min(maps.shape[2:]) - 1)
    if radius < 1:
        return maps
    kernel = torch.exp(-(torch.arange(-radius, radius + 1, device=maps.device).float() ** 2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    padded = F.pad(maps, (radius, radius, radius, radius), mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel[None, None, :, None]), kernel[None, None, None, :])


THRESHOLD = (0.04, 0.4)  # of saliency, as in the published configurations


@settings
class InpaintParams:
    """Inpainting and outpainting"""

    p_outpaint: float = option(0.4, "probability of inverting the mask", least=0, most=1)
    saliency: str = option(
        "",
        "detector of salient regions to mask: opencv (extra saliency) or a plug-in; empty = random boxes and strokes",
    )
    threshold: tuple[float, ...] | None = option(
        None,
        "saliency above which a pixel is masked, drawn from LOW,HIGH; none = 0.04,0.4; no effect without saliency",
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
    config: InpaintParams
    takes_masks = True
    channels = 4

    def __init__(self, params: InpaintParams, materials: Materials):
        super().__init__(params, materials)
        self.saliency: Saliency | None = None
        if params.saliency:
            self.saliency = load_plugin(
                GROUP,
                params.saliency,
                "controlnet_filter_params.saliency",
                "train without saliency, by random boxes and strokes",
            )

    @classmethod
    def note_on(cls, params: InpaintParams) -> str:
        if params.saliency or params.threshold is None:  # published configurations have one
            return ""
        return (
            "controlnet_filter_params has a threshold of saliency, which has no effect: without saliency, random boxes "
            "and strokes are masked"
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
