"""How near pictures are to references: PSNR, SSIM, sharpness, and consistency with what was enlarged.

Pictures are uint8 [N, H, W, 3]; every measure gives one value per picture, float64 [N], so that the reader of a report
can be told how sure a mean is. None of them needs a network.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from ..errors import InputError

# dB that a picture counts at most where a mean is taken, so that a single perfect one neither makes it infinite nor
# decides it. Rounding to whole levels alone leaves an MSE of 1/12, 58.9 dB: what is above is less than rounding.
PSNR_CAP = 60.0
_PEAK = 255.0
_LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue: ITU-R BT.601
# Wang et al. 2004, section III.
_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
_TAPS = np.exp(-0.5 * ((np.arange(_WINDOW) - _WINDOW // 2) / _SIGMA) ** 2)
_TAPS /= _TAPS.sum()
_STRIP = 32  # rows of windows at once


def _check(images: np.ndarray, least: int = 1) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not len(images):
        raise InputError(f"pictures must be uint8 [N, H, W, 3] with N > 0, not {images.dtype} {list(images.shape)}")
    if min(images.shape[1:3]) < least:
        size = f"{images.shape[2]}×{images.shape[1]}"
        raise InputError(f"pictures of {size} are too small for this measure, which needs {least}×{least} at least")


def _check_pair(a: np.ndarray, b: np.ndarray, least: int = 1) -> None:
    _check(a, least)
    _check(b, least)
    if a.shape != b.shape:
        raise InputError(f"pictures can only be compared with as many of the same size, not {list(a.shape)} with "
                         f"{list(b.shape)}")  # fmt: skip


def psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB, 10 log₁₀(255² / MSE), the MSE over all pixels and channels. float64 [N].

    Equal pictures give inf. Means are taken of the dB of single pictures, as is usual, and not of the MSE, which the
    few hardest pictures would decide; cap the values at ``PSNR_CAP`` first. InputError when the shapes differ.
    """
    _check_pair(a, b)
    errors = np.array([np.square(np.subtract(x, y, dtype=np.float64)).mean() for x, y in zip(a, b, strict=True)])
    with np.errstate(divide="ignore"):
        return 10 * np.log10(_PEAK**2 / errors)


def _windowed(maps: np.ndarray) -> np.ndarray:
    """Means under the Gaussian window wherever it fits. [M, H, W, 3] → [M, H - 10, W - 10, 3]."""
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
    # Strip by strip, so that what is at work stays in the processor's cache: several times faster at 1024 pixels.
    strips = [slice(top, top + _STRIP + _WINDOW - 1) for top in range(0, len(a) - _WINDOW + 1, _STRIP)]
    return np.concatenate([_similarity(a[strip], b[strip]) for strip in strips]).mean()


def ssim(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Structural similarity, 1 for equal pictures, in [-1, 1]. float64 [N].

    Wang et al. 2004, equation 13, with its Gaussian window (11 × 11, standard deviation 1.5), K₁ = 0.01 and K₂ = 0.03,
    averaged over the places at which the window lies inside the picture and over red, green and blue (the paper: grey).
    InputError when the shapes differ or a side is below 11 pixels.
    """
    _check_pair(a, b, _WINDOW)
    return np.array([_ssim(x, y) for x, y in zip(a, b, strict=True)])


def sharpness(images: np.ndarray) -> np.ndarray:
    """Root mean square length of the luminance's gradient, in levels of 255 per pixel, from differences of neighbours.
    float64 [N].

    To be read as a ratio to the real pictures': a blurred enlargement such as the bicubic one is below 1. (The mean of
    the length would not do: an edge smeared over many pixels has the same sum of steps as a sharp one.) It does not
    know where the edges are or whether they are the right ones, and noise and checkerboards raise it as details do, so
    that a value above 1 is no praise: PSNR and consistency have to stand beside it. InputError below 2 × 2 pixels.
    """
    _check(images, 2)
    values = []
    for image in images:
        grey = (image * _LUMA).sum(-1)
        across, down = np.diff(grey, axis=1)[:-1], np.diff(grey, axis=0)[:, :-1]
        values.append(math.sqrt((across**2 + down**2).mean()))
    return np.array(values)


def downsample(images: np.ndarray, factor: int) -> np.ndarray:
    """The mean of every factor × factor pixels, halves rounded up. uint8 [N, H, W, 3] → [N, H/factor, W/factor, 3].

    InputError when factor does not divide H and W.
    """
    _check(images)
    n, height, width, _ = images.shape
    if factor < 1 or height % factor or width % factor:
        raise InputError(f"pictures of {width}×{height} cannot be made {factor} times smaller: the factor must divide "
                         "both sides")  # fmt: skip
    sums = images.reshape(n, height // factor, factor, width // factor, factor, 3).sum((2, 4), dtype=np.int64)
    pixels = factor**2
    return ((2 * sums + pixels) // (2 * pixels)).astype(np.uint8)  # in whole numbers, hence exact


def enlargement(images: np.ndarray, low_res: np.ndarray) -> int:
    """How many times larger ``images`` are than ``low_res``, both [N, H, W, 3].

    InputError when it is not one whole number for both sides, or there is not one of them for each of the others.
    """
    _check(images)
    _check(low_res)
    if len(images) != len(low_res):
        raise InputError(f"there are {len(images)} pictures for {len(low_res)} inputs of low resolution; give one for "
                         "each")  # fmt: skip
    (height, width), (rows, columns) = images.shape[1:3], low_res.shape[1:3]
    if height % rows or width % columns or height // rows != width // columns:
        raise InputError(f"pictures of {width}×{height} are no enlargement of {columns}×{rows}: both sides must be the "
                         "same whole number of times longer")  # fmt: skip
    return height // rows


def consistency(images: np.ndarray, low_res: np.ndarray) -> np.ndarray:
    """``psnr`` in dB, of pictures averaged down again, to the pictures they were enlarged from. float64 [N].

    images: uint8 [N, H, W, 3]; low_res: uint8 [N, h, w, 3]. InputError as ``enlargement``.
    """
    return psnr(downsample(images, enlargement(images, low_res)), low_res)


def bicubic(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pillow's bicubic enlargement to (height, width), what every up-sampler must beat. uint8 [N, height, width, 3].

    InputError when a side would become shorter: the filter would then be another one.
    """
    _check(images)
    height, width = size
    if height < images.shape[1] or width < images.shape[2]:
        raise InputError(f"pictures of {images.shape[2]}×{images.shape[1]} cannot be enlarged to {width}×{height}; "
                         "give a size that is not smaller")  # fmt: skip
    resized = (Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC) for image in images)
    return np.stack([np.asarray(image) for image in resized])
