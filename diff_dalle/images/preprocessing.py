"""Named transforms of pictures with the names, arguments and defaults of torchvision, drawn from keyed random numbers.

A list of them turns a decoded picture of any size into pixels. Every random number is asked for by its purpose, so a
picture is transformed the same way in any process. Crops are resized straight from the decoded picture: one resampling
for each transform that changes the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from PIL import Image, ImageOps

from ..config import Fault, named, nearest, option, settings
from ..config.bounds import MAX_SIDE
from .decode import BrokenSample, Size
from .transforms import MAX_STRETCH

TRIES = 10  # draws of a random crop's shape until it fits, then the largest one in the middle; as in torchvision
FILTERS = {each.name.lower(): each for each in Image.Resampling}
# The arguments that each transform takes.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "RandomResizedCrop": ("size", "scale", "ratio", "interpolation", "antialias"),
    "Resize": ("size", "max_size", "interpolation", "antialias"),
    "CenterCrop": ("size",),
    "RandomCrop": ("size",),
    "RandomHorizontalFlip": ("p",),
    "RandomVerticalFlip": ("p",),
    "ToTensor": (),
}
SIZED = ("RandomResizedCrop", "Resize", "CenterCrop", "RandomCrop")
Draws = Callable[[str], float]  # a number in [0, 1) for each purpose


@settings
class TransformConfig:
    """Image transform"""

    refused: ClassVar = dict.fromkeys(
        ("padding", "pad_if_needed"),
        "is not supported: pictures that are too small for a crop are enlarged; leave it out",
    )

    name: str = option("ToTensor", "its name", choices=ARGUMENTS, required=True)
    size: tuple[int, ...] = option(
        (), "pixels: HEIGHT,WIDTH, or one number: a square or, of Resize, the shorter side", most=MAX_SIDE
    )
    scale: tuple[float, ...] = option((0.08, 1.0), "RandomResizedCrop: LOW,HIGH of the crop's area fraction")
    ratio: tuple[float, ...] = option((3 / 4, 4 / 3), "RandomResizedCrop: LOW,HIGH of width / height of the crop")
    p: float = option(0.5, "flips: probability", least=0, most=1)
    max_size: int | None = option(None, "Resize: maximum of the longer side in pixels", most=MAX_SIDE)
    interpolation: str = option("bilinear", "resampling filter", choices=FILTERS)
    antialias: bool | None = option(True, "antialiased resizing; always on")

    def faults(self) -> Iterator[Fault]:
        taken = ARGUMENTS[self.name]
        for name, default in vars(type(self)).items():
            if name in _OWN and name not in taken and getattr(self, name) != default:
                takes = f"takes {', '.join(taken)}" if taken else "takes no arguments"
                yield Fault(name, f"is no argument of {self.name}, which {takes}{nearest(name, taken)}")
        if self.name in SIZED and (len(self.size) not in (1, 2) or min(self.size) < 1):
            yield Fault.of(self, "size", f"{self.name} needs one or two numbers of pixels above 0")
        for name in ("scale", "ratio"):
            values = getattr(self, name)
            if len(values) != 2 or not 0 < values[0] <= values[1]:
                yield Fault(name, "must be two numbers above 0, the smaller one first", values)
        if self.scale[-1:] > (1,):
            yield Fault.of(self, "scale", "a crop has at most the whole area, 1")
        if self.max_size is not None and (len(self.size) != 1 or self.max_size < self.size[0]):
            yield Fault.of(self, "max_size", f"needs a {named('size')} of one number, and must be at least that")
        if self.antialias is False:
            yield Fault.of(self, "antialias", "pictures are always resized with antialiasing: leave it out")

    @property
    def shape(self) -> Size | None:
        """The size that its pictures have; None = it depends on the picture."""
        if self.name not in SIZED or (self.name == "Resize" and len(self.size) == 1):
            return None
        return self.size[0], self.size[-1]


_OWN = {name for names in ARGUMENTS.values() for name in names}


def _sized(transforms: Sequence[TransformConfig]) -> list[TransformConfig]:
    return [each for each in transforms if each.name in SIZED]


def output_size(transforms: Sequence[TransformConfig]) -> Size | None:
    """The size of pictures after the transforms; None = it depends on the picture."""
    sized = _sized(transforms)
    return sized[-1].shape if sized else None


def least_side(transforms: Sequence[TransformConfig]) -> int | None:
    """The least side that pictures have after the transforms; None = they keep that of the file."""
    sized = _sized(transforms)
    return min(sized[-1].size) if sized else None


def decoding_cover(transforms: Sequence[TransformConfig], size: Size) -> Size | None:
    """The size to cover with a picture that is decoded at a fraction, for these transforms and then a center crop of
    ``size``; None = decode all of it."""
    sized = _sized(transforms)
    if not sized:
        return size
    first = sized[0]
    if first.name in ("CenterCrop", "RandomCrop"):
        return None
    height, width = first.size[0], first.size[-1]
    if first.name == "Resize":
        return height, width
    part = math.sqrt(first.scale[0] * min(first.ratio[0], 1 / first.ratio[1], 1))  # of a side, at least
    return math.ceil(height / part), math.ceil(width / part)


def transform(
    image: Image.Image, full: Size, transforms: Sequence[TransformConfig], draws: Draws | None
) -> tuple[Image.Image, Size]:
    """A picture after all transforms, and the size that it has, or would have if it were decoded at full size.

    image: RGB, decoded at full size or at a fraction of it.
    full:  (height, width) of the original. Crops and sizes follow from it alone.
    draws: random numbers; None = no augmentation: the largest crop in the middle, and no flips.

    Raises BrokenSample for a picture too narrow to resize.
    """
    for number, each in enumerate(transforms):
        purpose = f"{each.name} {number} "
        own: Draws | None = None if draws is None else lambda name, purpose=purpose: draws(purpose + name)
        if each.name == "RandomResizedCrop":
            image = _resized(image, full, _random_box(full, each, own), each.shape or full, each)
        elif each.name == "Resize":
            size = each.shape or _shorter_side(full, each)
            image = _resized(image, full, (0, 0, *full), size, each)
        elif each.name in ("CenterCrop", "RandomCrop"):
            size = each.shape or full
            image = _cropped(image, full, size, each, own if each.name == "RandomCrop" else None)
        elif own and each.name == "RandomHorizontalFlip" and own("flip") < each.p:
            image = ImageOps.mirror(image)
        elif own and each.name == "RandomVerticalFlip" and own("flip") < each.p:
            image = ImageOps.flip(image)
        if each.name in SIZED:
            full = image.height, image.width
    return image, full


Box = tuple[int, int, int, int]  # top, left, height, width in pixels of the original


def _random_box(full: Size, config: TransformConfig, draws: Draws | None) -> Box:
    height, width = full
    low, high = config.ratio
    for number in range(TRIES if draws else 0):
        assert draws is not None
        area = height * width * _between(draws(f"area {number}"), *config.scale)
        ratio = math.exp(_between(draws(f"ratio {number}"), math.log(low), math.log(high)))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            top = int(draws("top") * (height - rows + 1))
            return top, int(draws("left") * (width - columns + 1)), rows, columns
    columns = min(width, max(1, round(height * high)))  # the largest one in the middle
    rows = min(height, max(1, round(columns / low)))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _between(uniform: float, low: float, high: float) -> float:
    return low + uniform * (high - low)


def _shorter_side(full: Size, config: TransformConfig) -> Size:
    """The size at which the shorter side has ``config.size`` pixels, or the longer one its maximum."""
    short, long = min(full), max(full)
    side = config.size[0]
    longer = int(side * long / short)
    if config.max_size is not None and longer > config.max_size:
        side, longer = max(1, int(config.max_size * side / longer)), config.max_size
    return (side, longer) if full[0] <= full[1] else (longer, side)


def _resized(image: Image.Image, full: Size, box: Box, size: Size, config: TransformConfig) -> Image.Image:
    """A box of a picture, given in pixels of the original, at another size."""
    top, left, rows, columns = box
    if max(size) > MAX_STRETCH * max(min(size), 1):
        raise BrokenSample(f"too narrow: {full[1]} × {full[0]}")
    down, across = image.height / full[0], image.width / full[1]
    corners = (left * across, top * down, (left + columns) * across, (top + rows) * down)
    return image.resize(size[::-1], FILTERS[config.interpolation], corners)


def _cropped(image: Image.Image, full: Size, size: Size, config: TransformConfig, draws: Draws | None) -> Image.Image:
    """A crop without a change of size, except of a picture that is smaller than the crop, which is enlarged first."""
    scale = max(size[0] / image.height, size[1] / image.width)
    if scale > 1:
        larger = max(size[0], round(image.height * scale)), max(size[1], round(image.width * scale))
        image = _resized(image, full, (0, 0, *full), larger, config)
    free = image.height - size[0], image.width - size[1]
    top, left = (
        (int(draws(name) * (room + 1)) for name, room in zip(("top", "left"), free, strict=True))
        if draws
        else (room // 2 for room in free)
    )
    return image.crop((left, top, left + size[1], top + size[0]))
