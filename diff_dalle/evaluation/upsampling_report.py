"""What a reader wants to see of an up-sampler: is it nearer to the real pictures than bicubic ones, and as sharp?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..errors import InputError
from ..images.grid import image_grid
from .fidelity import PSNR_CAP, bicubic, consistency, enlargement, psnr, sharpness, ssim
from .intervals import mean_interval, ratio_interval
from .report import Section, markdown_table

SHOWN = 6  # pictures in the grid, a row for each
SCREEN_SIDE = 128  # screen pixels up to which small pictures are enlarged
WINDOW = 256  # pixels of larger pictures that are shown: their middle, as details would be lost in a smaller copy

EXPLANATION = f"""
*Bicubic* is the plain enlargement that an up-sampler must beat. *PSNR* and *SSIM* compare with the real pictures, pixel
by pixel and in the structure of small windows; both prefer a blurred picture to a sharp one whose details lie a little
off. *Sharpness*, the size of gradients where the real pictures' is 1, tells these apart, but noise raises it too.
*Consistency*: the picture averaged down again, compared with its input. Means over *n* pictures, with 95 % intervals;
no picture counts more than {PSNR_CAP:g} dB.
"""
EXPLANATION_ALONE = f"""
*Consistency*: the picture averaged down again, compared with its input. *Bicubic* is the plain enlargement. Means over
*n* pictures, with 95 % intervals; no picture counts more than {PSNR_CAP:g} dB. There are no real pictures to compare
with, so how near and how sharp these are is not known.
"""


@dataclass(frozen=True)
class Estimate:
    """A mean over pictures with its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """Without the interval where it has no width."""
        value, low, high = (f"{number:.{digits}f}" for number in (self.value, self.low, self.high))
        return value if self.low == self.high else f"{value} ({low} – {high})"


@dataclass(frozen=True)
class Row:
    """consistency, psnr: dB; sharpness: relative to the real pictures. None: there is nothing to compare with."""

    name: str
    consistency: Estimate
    psnr: Estimate | None = None
    ssim: Estimate | None = None
    sharpness: Estimate | None = None


# Columns of the table: field of a row, heading, digits after the point.
COLUMNS = (
    ("psnr", "PSNR (dB)", 2),
    ("ssim", "SSIM", 3),
    ("sharpness", "sharpness", 3),
    ("consistency", "consistency (dB)", 2),
)


@dataclass(frozen=True)
class UpsamplingReport:
    """rows: bicubic, ours and, where there are any, real pictures; n: pictures in each; psnr_gain: how many dB ours are
    nearer to the real pictures than bicubic, from differences picture by picture."""

    rows: tuple[Row, ...]
    n: int
    psnr_gain: Estimate | None = None

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    def to_dict(self) -> dict:
        """For JSON: what was not measured is left out."""
        scores: dict = {"n": self.n}
        if self.psnr_gain is not None:
            scores["psnr_gain"] = asdict(self.psnr_gain)
        for row in self.rows:
            scores[row.name] = {name: value for name, value in asdict(row).items() if isinstance(value, dict)}
        return scores

    def table(self) -> str:
        """A Markdown table; columns in which nothing was measured are left out."""
        columns = [column for column in COLUMNS if any(getattr(row, column[0]) is not None for row in self.rows)]
        rows = []
        for row in self.rows:
            cells = [(getattr(row, field), digits) for field, _, digits in columns]
            rows.append([row.name, *("–" if cell is None else cell.text(digits) for cell, digits in cells), self.n])
        return markdown_table(["pictures", *(heading for _, heading, _ in columns), "n"], rows)


def _mean(values: np.ndarray) -> Estimate:
    return Estimate(float(values.mean()), *mean_interval(values))


def _sharpness_ratio(values: np.ndarray, real: np.ndarray) -> Estimate:
    return Estimate(float(values.mean() / real.mean()), *ratio_interval(values, real))


def evaluate_upsampling(low_res: np.ndarray, ours: np.ndarray, real: np.ndarray | None = None) -> UpsamplingReport:
    """Compare enlarged pictures, and bicubic enlargements of the same inputs, with the inputs and the real pictures.

    low_res: uint8 [N, h, w, 3]; ours: uint8 [N, H, W, 3], picture i made from input i; real: uint8 [N, H, W, 3], or
    None, and only consistency is measured. Raises InputError when numbers or sizes do not fit, N < 2, a side of the
    real pictures is below 11 pixels, or each of them is of a single colour.
    """
    enlargement(ours, low_res)
    pictures = {"bicubic": bicubic(low_res, ours.shape[1:3]), "ours": ours}
    if real is not None:
        pictures["real pictures"] = real
    kept = {name: _mean(np.minimum(consistency(made, low_res), PSNR_CAP)) for name, made in pictures.items()}
    if real is None:
        return UpsamplingReport(tuple(Row(name, value) for name, value in kept.items()), len(ours))
    edges = sharpness(real)
    if not edges.any():
        raise InputError("every real picture is of one colour: there is no sharpness to compare with; give others")
    near = {name: np.minimum(psnr(pictures[name], real), PSNR_CAP) for name in ("bicubic", "ours")}
    rows = [
        Row(name, kept[name], _mean(near[name]), _mean(ssim(pictures[name], real)),
            _sharpness_ratio(sharpness(pictures[name]), edges))
        for name in near
    ]  # fmt: skip
    rows.append(Row("real pictures", kept["real pictures"], sharpness=_sharpness_ratio(edges, edges)))
    return UpsamplingReport(tuple(rows), len(ours), _mean(near["ours"] - near["bicubic"]))


def _score_section(report: UpsamplingReport) -> Section:
    text = f"{EXPLANATION_ALONE if report.psnr_gain is None else EXPLANATION}\n{report.table()}"
    if report.psnr_gain is not None:
        text += f"\n\nOurs − bicubic in PSNR, picture by picture: {report.psnr_gain.text(2)} dB."
    return Section("How good is the enlargement?", text)


def _picture_section(
    low_res: np.ndarray, ours: np.ndarray, real: np.ndarray | None, captions: Sequence[str]
) -> Section:
    factor, (height, width) = enlargement(ours, low_res), ours.shape[1:3]
    ways = {
        "input": low_res[:SHOWN].repeat(factor, 1).repeat(factor, 2),
        "bicubic": bicubic(low_res[:SHOWN], (height, width)),
        "ours": ours[:SHOWN],
    }
    if real is not None:
        ways["original"] = real[:SHOWN]
    (top, bottom), (left, right) = (_middle(length, factor) for length in (height, width))
    cells = np.stack(list(ways.values()), 1)[:, :, top:bottom, left:right].reshape(-1, bottom - top, right - left, 3)
    labels = [
        f"[{name}] {caption}" if column == 0 else f"[{name}]"
        for caption in captions[:SHOWN]
        for column, name in enumerate(ways)
    ]
    small, large = (f"{pictures.shape[2]} × {pictures.shape[1]}" for pictures in (low_res, ours))
    text = (f"The first {len(ours[:SHOWN])}, not chosen by hand. From left to right: the input ({small}, its pixels "
            f"repeated), and at {large}: {', '.join(list(ways)[1:])}.")  # fmt: skip
    if cells.shape[1:3] != (height, width):
        text += f" Shown is the middle, {right - left} × {bottom - top}."
    grid = image_grid(cells, labels, len(ways), max(1, SCREEN_SIDE // max(cells.shape[1:3])))
    return Section("Enlarged pictures", text, grid, "upsampling.png")


def _middle(length: int, factor: int) -> tuple[int, int]:
    """Where the part of ``length`` pixels that is shown begins and ends, in whole pixels of the input."""
    pixels = length // factor
    shown = min(pixels, max(1, WINDOW // factor))
    start = (pixels - shown) // 2
    return start * factor, (start + shown) * factor


def upsampling_sections(
    report: UpsamplingReport,
    low_res: np.ndarray,
    ours: np.ndarray,
    real: np.ndarray | None,
    captions: Sequence[str],
) -> list[Section]:
    """The scores, and the first pictures beside their inputs, bicubic enlargements and originals (where there are any).

    low_res, ours, real: what ``evaluate_upsampling`` made the report of; captions: one for each picture, may be empty.
    """
    if len(captions) != len(ours):
        raise InputError(f"there are {len(captions)} captions for {len(ours)} enlarged pictures; give one for each")
    return [_score_section(report), _picture_section(low_res, ours, real, captions)]
