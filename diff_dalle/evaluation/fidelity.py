"""Fidelity of images to references: PSNR, SSIM, sharpness, and consistency with the low-resolution input; and the
report of upsamplers on real images, in comparison with bicubic upsampling.

Images are uint8 [N, H, W, 3]. Every measure returns one value per image, float64 [N], so that reports can give
confidence intervals of the mean. None of them needs a network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image

from ..config import InputError
from ..images.grid import image_grid
from .intervals import Estimate, mean_interval, ratio_interval
from .report import Figure, Section, Table

# Maximum PSNR, in dB, of an image in a mean, so that a single perfect image neither makes the mean infinite nor
# dominates it. Rounding to integer levels alone leaves an MSE of 1/12, 58.9 dB: higher values are below rounding error.
PSNR_CAP = 60.0
_PEAK = 255.0
_LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue: ITU-R BT.601
# Wang et al. 2004, section III.
_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
_TAPS = np.exp(-0.5 * ((np.arange(_WINDOW) - _WINDOW // 2) / _SIGMA) ** 2)
_TAPS /= _TAPS.sum()
_ROWS = 32  # rows of windows per block


def _check(images: np.ndarray, minimum: int = 1) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not len(images):
        raise InputError(f"images must be uint8 [N, H, W, 3] with N > 0, not {images.dtype} {list(images.shape)}")
    if min(images.shape[1:3]) < minimum:
        size = f"{images.shape[2]}×{images.shape[1]}"
        raise InputError(f"images of {size} are too small for this measure, which needs at least {minimum}×{minimum}")


def _check_pair(a: np.ndarray, b: np.ndarray, minimum: int = 1) -> None:
    _check(a, minimum)
    _check(b, minimum)
    if a.shape != b.shape:
        raise InputError(
            f"images can only be compared with the same number of images of the same size, but the shapes are "
            f"{list(a.shape)} and {list(b.shape)}"
        )


def psnr_uint8(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB, 10 log₁₀(255² / MSE), the MSE over all pixels and channels. float64 [N].

    Identical images give inf. As usual, average the dB of the images, not their MSE, which the hardest images would
    dominate; cap the values at ``PSNR_CAP`` first. InputError for different shapes.
    """
    _check_pair(a, b)
    errors = np.array([np.square(np.subtract(x, y, dtype=np.float64)).mean() for x, y in zip(a, b, strict=True)])
    with np.errstate(divide="ignore"):
        return 10 * np.log10(_PEAK**2 / errors)


def _windowed(maps: np.ndarray) -> np.ndarray:
    """Means under the Gaussian window at all valid positions. [M, H, W, 3] → [M, H - 10, W - 10, 3]."""
    height, width = (length - _WINDOW + 1 for length in maps.shape[1:3])
    columns = sum(tap * maps[:, k : k + height] for k, tap in enumerate(_TAPS))
    return sum(tap * columns[:, :, k : k + width] for k, tap in enumerate(_TAPS))


def _similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[H, W, 3] → [H - 10, W - 10, 3]."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    mean_a, mean_b, square_a, square_b, product = _windowed(np.stack([a, b, a * a, b * b, a * b]))
    means, covariance = mean_a * mean_b, product - mean_a * mean_b
    squares, variances = mean_a**2 + mean_b**2, square_a - mean_a**2 + square_b - mean_b**2
    return (2 * means + _C1) * (2 * covariance + _C2) / ((squares + _C1) * (variances + _C2))


def _ssim(a: np.ndarray, b: np.ndarray) -> float:
    # In blocks of rows, so that intermediate maps stay in the CPU cache: several times faster at 1024 pixels.
    blocks = [slice(top, top + _ROWS + _WINDOW - 1) for top in range(0, len(a) - _WINDOW + 1, _ROWS)]
    return np.concatenate([_similarity(a[block], b[block]) for block in blocks]).mean()


def ssim(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Structural similarity in [-1, 1]; 1 for identical images. float64 [N].

    Wang et al. 2004, equation 13, with its Gaussian window (11 × 11, standard deviation 1.5), K₁ = 0.01 and K₂ = 0.03,
    averaged over all valid window positions and over red, green and blue (the paper: gray).
    InputError for different shapes and for images below 11 × 11 pixels.
    """
    _check_pair(a, b, _WINDOW)
    return np.array([_ssim(x, y) for x, y in zip(a, b, strict=True)])


def sharpness(images: np.ndarray) -> np.ndarray:
    """Root mean square norm of the luminance gradient, in levels of 255 per pixel, from finite differences.
    float64 [N].

    Report it relative to real images: blurred ones, such as bicubic upsampling, are below 1. (The mean norm would not
    detect blur: the differences across an edge have the same sum however wide the edge is.) Sharpness does not measure
    whether edges are correct, and noise and checkerboard artifacts raise it too, so read values above 1 together with
    PSNR and consistency. InputError for images below 2 × 2 pixels.
    """
    _check(images, 2)
    values = []
    for image in images:
        luma = (image * _LUMA).sum(-1)
        across, down = np.diff(luma, axis=1)[:-1], np.diff(luma, axis=0)[:, :-1]
        values.append(math.sqrt((across**2 + down**2).mean()))
    return np.array(values)


def average_pool_uint8(images: np.ndarray, factor: int) -> np.ndarray:
    """The mean of every factor × factor pixels, halves rounded up. uint8 [N, H, W, 3] → [N, H/factor, W/factor, 3].

    InputError unless factor divides H and W.
    """
    _check(images)
    n, height, width, _ = images.shape
    if factor < 1 or height % factor or width % factor:
        raise InputError(
            f"images of {width}×{height} cannot be downsampled {factor} times: the factor must divide width and height"
        )
    sums = images.reshape(n, height // factor, factor, width // factor, factor, 3).sum((2, 4), dtype=np.int64)
    pixels = factor**2
    return ((2 * sums + pixels) // (2 * pixels)).astype(np.uint8)  # integer arithmetic, hence exact


def upsampling_factor(images: np.ndarray, low_res: np.ndarray) -> int:
    """The ratio of the resolutions of ``images`` and ``low_res``, both [N, H, W, 3].

    InputError unless it is the same integer for width and height, and the numbers of images agree.
    """
    _check(images)
    _check(low_res)
    if len(images) != len(low_res):
        raise InputError(f"there are {len(images)} images for {len(low_res)} low-resolution inputs; pass one per image")
    (height, width), (rows, columns) = images.shape[1:3], low_res.shape[1:3]
    if height % rows or width % columns or height // rows != width // columns:
        raise InputError(
            f"images of {width}×{height} cannot be an upsampling of {columns}×{rows} images: the ratio must be the "
            "same integer for width and height"
        )
    return height // rows


def consistency(images: np.ndarray, low_res: np.ndarray) -> np.ndarray:
    """PSNR in dB of the downsampled images (``average_pool_uint8``) to their low-resolution inputs. float64 [N].

    images: uint8 [N, H, W, 3]; low_res: uint8 [N, h, w, 3]. InputError as for ``upsampling_factor``.
    """
    return psnr_uint8(average_pool_uint8(images, upsampling_factor(images, low_res)), low_res)


def bicubic_upsample(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pillow's bicubic upsampling to (height, width): the baseline of every upsampler. uint8 [N, height, width, 3].

    size: not smaller, where Pillow would use another filter.
    """
    _check(images)
    resized = (Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC) for image in images)
    return np.stack([np.asarray(image) for image in resized])


# ------------------------------------------------------------------------------------------ the report of upsamplers

GRID_ROWS = 6  # images in the grid
CELL_SIZE = 128  # pixels up to which small images are magnified in the grid
CROP = 256  # larger images are center-cropped to so many pixels in the grid, at full resolution

EXPLANATION = f"""
*Bicubic* is the baseline. *PSNR* and *SSIM* compare with the real images, by pixel and by the structure of small
windows; both prefer blur to sharp details that are slightly displaced. *Sharpness*, the RMS gradient relative to the
real images, separates the two, but noise raises it too. *Consistency*: PSNR of the downsampled result to its input.
Means over *n* images with 95 % intervals; PSNR per image is capped at {PSNR_CAP:g} dB.
"""
# Columns of the table: measure, heading, decimals.
COLUMNS = (
    ("psnr", "PSNR (dB)", 2),
    ("ssim", "SSIM", 3),
    ("sharpness", "sharpness", 3),
    ("consistency", "consistency (dB)", 2),
)


@dataclass(frozen=True)
class UpsamplingReport:
    """rows: of bicubic upsampling, ours and the real images, the measures by name: consistency and psnr in dB, ssim,
    and sharpness relative to the real images, of which the first and the last are measured of these too; n: images per
    row; psnr_gain: mean of the paired differences in PSNR between ours and bicubic, in dB."""

    rows: Mapping[str, Mapping[str, Estimate]]
    n: int
    psnr_gain: Estimate

    def to_dict(self) -> dict:
        """For JSON."""
        rows = {name: {key: asdict(value) for key, value in row.items()} for name, row in self.rows.items()}
        return {"n": self.n, "psnr_gain": asdict(self.psnr_gain), **rows}

    def table(self) -> Table:
        rows = []
        for name, row in self.rows.items():
            cells = [row[key].text(digits) if key in row else "–" for key, _, digits in COLUMNS]
            rows.append([name, *cells, self.n])
        return Table(["images", *(heading for _, heading, _ in COLUMNS), "n"], rows)


def _mean(values: np.ndarray) -> Estimate:
    return Estimate(float(values.mean()), *mean_interval(values))


def evaluate_upsampling(low_res: np.ndarray, ours: np.ndarray, real: np.ndarray) -> UpsamplingReport:
    """Compare upsampled images, and bicubic upsampling of the same inputs, with the inputs and the real images.

    low_res: uint8 [N, h, w, 3]; ours, real: uint8 [N, H, W, 3], image i from input i. Raises InputError for numbers or
    sizes that do not match, N < 2, real images below 11 × 11 pixels, and real images of a single color each.
    """
    upsampling_factor(ours, low_res)
    images = {"bicubic": bicubic_upsample(low_res, (ours.shape[1], ours.shape[2])), "ours": ours, "real images": real}
    rows = {
        name: {"consistency": _mean(np.minimum(consistency(made, low_res), PSNR_CAP))} for name, made in images.items()
    }
    edges = sharpness(real)
    if not edges.any():
        raise InputError("every real image has a single color, so relative sharpness is undefined; use other images")
    near = {name: np.minimum(psnr_uint8(images[name], real), PSNR_CAP) for name in ("bicubic", "ours")}
    for name, values in near.items():
        rows[name] |= {"psnr": _mean(values), "ssim": _mean(ssim(images[name], real))}
    for name, made in images.items():
        values = sharpness(made)
        rows[name]["sharpness"] = Estimate(float(values.mean() / edges.mean()), *ratio_interval(values, edges))
    return UpsamplingReport(rows, len(ours), _mean(near["ours"] - near["bicubic"]))


def upsampling_sections(
    report: UpsamplingReport, low_res: np.ndarray, ours: np.ndarray, real: np.ndarray, captions: Sequence[str]
) -> list[Section]:
    """The scores, and a grid of the first images beside their inputs, bicubic upsampling and originals.

    low_res, ours, real: as passed to ``evaluate_upsampling``; captions: one per image, may be empty.
    """
    if len(captions) != len(ours):
        raise InputError(f"there are {len(captions)} captions for {len(ours)} upsampled images; pass one per image")
    factor, (height, width) = upsampling_factor(ours, low_res), ours.shape[1:3]
    columns = {
        "input": low_res[:GRID_ROWS].repeat(factor, 1).repeat(factor, 2),
        "bicubic": bicubic_upsample(low_res[:GRID_ROWS], (height, width)),
        "ours": ours[:GRID_ROWS],
        "original": real[:GRID_ROWS],
    }
    (top, bottom), (left, right) = (_center_crop(length, factor) for length in (height, width))
    cells = np.stack(list(columns.values()), 1)[:, :, top:bottom, left:right].reshape(-1, bottom - top, right - left, 3)
    labels = [
        f"[{name}] {caption}" if column == 0 else f"[{name}]"
        for caption in captions[:GRID_ROWS]
        for column, name in enumerate(columns)
    ]
    small, large = (f"{images.shape[2]} × {images.shape[1]}" for images in (low_res, ours))
    text = (
        f"The first {len(ours[:GRID_ROWS])} images, not selected. From left to right: the input ({small}, pixels "
        f"repeated), then at {large}: {', '.join(list(columns)[1:])}."
    )
    if cells.shape[1:3] != (height, width):
        text += f" Center crops of {right - left} × {bottom - top} are shown."
    grid = image_grid(cells, labels, len(columns), CELL_SIZE)
    difference = f"Paired difference in PSNR, ours − bicubic: {report.psnr_gain.text(2)} dB."
    return [
        Section("Upsampling", [EXPLANATION, report.table(), difference]),
        Section("Upsampled images", [text, Figure("upsampling.png", grid)]),
    ]


def _center_crop(length: int, factor: int) -> tuple[int, int]:
    """Start and end of the center crop of ``length`` pixels, both multiples of the upsampling factor."""
    pixels = length // factor
    cropped = min(pixels, max(1, CROP // factor))
    start = (pixels - cropped) // 2
    return start * factor, (start + cropped) * factor
