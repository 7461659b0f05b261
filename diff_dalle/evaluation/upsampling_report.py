"""Upsamplers on real images: fidelity to the originals and sharpness, compared with bicubic upsampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..config import InputError
from ..images.grid import image_grid
from .fidelity import PSNR_CAP, bicubic_upsample, consistency, psnr_uint8, sharpness, ssim, upsampling_factor
from .intervals import Estimate, mean_interval, ratio_interval
from .report import Figure, Section, Table

GRID_ROWS = 6  # images in the grid
CELL_SIZE = 128  # pixels up to which small images are magnified in the grid
CROP = 256  # larger images are center-cropped to so many pixels in the grid, at full resolution

EXPLANATION = f"""
*Bicubic* is the baseline. *PSNR* and *SSIM* compare with the real images, by pixel and by the structure of small
windows; both prefer blur to sharp details that are slightly displaced. *Sharpness*, the RMS gradient relative to the
real images, separates the two, but noise raises it too. *Consistency*: PSNR of the downsampled result to its input.
Means over *n* images with 95 % intervals; PSNR per image is capped at {PSNR_CAP:g} dB.
"""
EXPLANATION_WITHOUT_REAL = f"""
*Consistency*: PSNR of the downsampled result to its input. *Bicubic* is the baseline. Means over *n* images with 95 %
intervals; PSNR per image is capped at {PSNR_CAP:g} dB. Without real images, fidelity and sharpness are not measured.
"""


@dataclass(frozen=True)
class Row:
    """consistency, psnr: dB; sharpness: relative to the real images. None: not measured."""

    name: str
    consistency: Estimate
    psnr: Estimate | None = None
    ssim: Estimate | None = None
    sharpness: Estimate | None = None


# Columns of the table: field of a row, heading, decimals.
COLUMNS = (
    ("psnr", "PSNR (dB)", 2),
    ("ssim", "SSIM", 3),
    ("sharpness", "sharpness", 3),
    ("consistency", "consistency (dB)", 2),
)


@dataclass(frozen=True)
class UpsamplingReport:
    """rows: bicubic, ours and, if given, real images; n: images per row; psnr_gain: mean of the paired differences in
    PSNR between ours and bicubic, in dB."""

    rows: tuple[Row, ...]
    n: int
    psnr_gain: Estimate | None = None

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict:
        """For JSON, without what was not measured."""
        scores: dict = {"n": self.n}
        if self.psnr_gain is not None:
            scores["psnr_gain"] = asdict(self.psnr_gain)
        for row in self.rows:
            scores[row.name] = {name: value for name, value in asdict(row).items() if isinstance(value, dict)}
        return scores

    def table(self) -> Table:
        """Without empty columns."""
        columns = [column for column in COLUMNS if any(getattr(row, column[0]) is not None for row in self.rows)]
        rows = []
        for row in self.rows:
            cells = [(getattr(row, field), digits) for field, _, digits in columns]
            rows.append([row.name, *("–" if cell is None else cell.text(digits) for cell, digits in cells), self.n])
        return Table(["images", *(heading for _, heading, _ in columns), "n"], rows)


def _mean(values: np.ndarray) -> Estimate:
    return Estimate(float(values.mean()), *mean_interval(values))


def _sharpness_ratio(values: np.ndarray, real: np.ndarray) -> Estimate:
    return Estimate(float(values.mean() / real.mean()), *ratio_interval(values, real))


def evaluate_upsampling(low_res: np.ndarray, ours: np.ndarray, real: np.ndarray | None = None) -> UpsamplingReport:
    """Compare upsampled images, and bicubic upsampling of the same inputs, with the inputs and the real images.

    low_res: uint8 [N, h, w, 3]; ours: uint8 [N, H, W, 3], image i from input i; real: uint8 [N, H, W, 3], or None to
    measure consistency only. Raises InputError for numbers or sizes that do not match, N < 2, real images below 11 × 11
    pixels, and real images of a single color each.
    """
    upsampling_factor(ours, low_res)
    images = {"bicubic": bicubic_upsample(low_res, (ours.shape[1], ours.shape[2])), "ours": ours}
    if real is not None:
        images["real images"] = real
    consistent = {name: _mean(np.minimum(consistency(made, low_res), PSNR_CAP)) for name, made in images.items()}
    if real is None:
        return UpsamplingReport(tuple(Row(name, value) for name, value in consistent.items()), len(ours))
    edges = sharpness(real)
    if not edges.any():
        raise InputError("every real image has a single color, so relative sharpness is undefined; use other images")
    near = {name: np.minimum(psnr_uint8(images[name], real), PSNR_CAP) for name in ("bicubic", "ours")}
    rows = []
    for name, values in near.items():
        sharp = _sharpness_ratio(sharpness(images[name]), edges)
        rows.append(Row(name, consistent[name], _mean(values), _mean(ssim(images[name], real)), sharp))
    rows.append(Row("real images", consistent["real images"], sharpness=_sharpness_ratio(edges, edges)))
    return UpsamplingReport(tuple(rows), len(ours), _mean(near["ours"] - near["bicubic"]))


def _score_section(report: UpsamplingReport) -> Section:
    gain = report.psnr_gain
    explanation = EXPLANATION_WITHOUT_REAL if gain is None else EXPLANATION
    difference = "" if gain is None else f"Paired difference in PSNR, ours − bicubic: {gain.text(2)} dB."
    return Section("Upsampling", [explanation, report.table(), difference])


def _grid_section(low_res: np.ndarray, ours: np.ndarray, real: np.ndarray | None, captions: Sequence[str]) -> Section:
    factor, (height, width) = upsampling_factor(ours, low_res), ours.shape[1:3]
    columns = {
        "input": low_res[:GRID_ROWS].repeat(factor, 1).repeat(factor, 2),
        "bicubic": bicubic_upsample(low_res[:GRID_ROWS], (height, width)),
        "ours": ours[:GRID_ROWS],
    }
    if real is not None:
        columns["original"] = real[:GRID_ROWS]
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
    return Section("Upsampled images", [text, Figure("upsampling.png", grid)])


def _center_crop(length: int, factor: int) -> tuple[int, int]:
    """Start and end of the center crop of ``length`` pixels, both multiples of the upsampling factor."""
    pixels = length // factor
    cropped = min(pixels, max(1, CROP // factor))
    start = (pixels - cropped) // 2
    return start * factor, (start + cropped) * factor


def upsampling_sections(
    report: UpsamplingReport,
    low_res: np.ndarray,
    ours: np.ndarray,
    real: np.ndarray | None,
    captions: Sequence[str],
) -> list[Section]:
    """The scores, and a grid of the first images beside their inputs, bicubic upsampling and originals (if given).

    low_res, ours, real: as passed to ``evaluate_upsampling``; captions: one per image, may be empty.
    """
    if len(captions) != len(ours):
        raise InputError(f"there are {len(captions)} captions for {len(ours)} upsampled images; pass one per image")
    return [_score_section(report), _grid_section(low_res, ours, real, captions)]
