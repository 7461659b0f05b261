"""The upsampler's report: its numbers from fidelity's, its image pixel by pixel."""

import json
import math
import re

import numpy as np
import pytest

from diff_dalle.config import InputError
from diff_dalle.evaluation import fidelity
from diff_dalle.evaluation.fidelity import (
    GRID_ROWS,
    PSNR_CAP,
    average_pool_uint8,
    bicubic_upsample,
    consistency,
    evaluate_upsampling,
    psnr_uint8,
    sharpness,
    ssim,
    upsampling_sections,
)
from diff_dalle.evaluation.report import Report
from diff_dalle.images.grid import MARGIN, image_grid
from diff_dalle.worlds.shapes.prompts import shape_prompts
from diff_dalle.worlds.shapes.render import render

PROMPTS = shape_prompts(2, 0)[:8]
CAPTIONS = [prompt.text for prompt in PROMPTS]


@pytest.fixture(scope="module")
def real():
    return np.stack([render(prompt.scene, 32) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def low_res(real):
    return average_pool_uint8(real, 4)


@pytest.fixture(scope="module")
def ours(real):
    """An upsampler that is nearly right."""
    return np.clip(real + np.random.RandomState(0).normal(0, 6, real.shape), 0, 255).astype(np.uint8)


def test_every_number_is_the_mean_of_what_fidelity_measures(low_res, ours, real):
    report = evaluate_upsampling(low_res, ours, real)
    plain = bicubic_upsample(low_res, (32, 32))
    assert report.n == 8 and list(report.rows) == ["bicubic", "ours", "real images"]
    for name, made in (("bicubic", plain), ("ours", ours)):
        expected = {"consistency": consistency(made, low_res).mean(), "psnr": psnr_uint8(made, real).mean()}
        expected |= {"ssim": ssim(made, real).mean(), "sharpness": sharpness(made).mean() / sharpness(real).mean()}
        row = report.rows[name]
        assert {key: found.value for key, found in row.items()} == pytest.approx(expected)
        assert all(found.low < found.value < found.high for found in row.values())
    bicubic = report.rows["bicubic"]
    assert report.rows["ours"]["psnr"].low > bicubic["psnr"].high and bicubic["sharpness"].high < 0.6


def test_the_gain_is_judged_image_by_image(low_res, ours, real):
    """Its interval is that of the differences: much narrower than what two separate means allow for."""
    gains = psnr_uint8(ours, real) - psnr_uint8(bicubic_upsample(low_res, (32, 32)), real)
    found = evaluate_upsampling(low_res, ours, real).psnr_gain
    assert found.value == pytest.approx(gains.mean())
    assert found.high - found.value == pytest.approx(1.959964 * gains.std(ddof=1) / math.sqrt(8))
    same = evaluate_upsampling(low_res, bicubic_upsample(low_res, (32, 32)), real).psnr_gain
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_perfect_images_leave_every_number_finite(low_res, real):
    """Equal to the real ones, which are infinitely many dB: the cap, and valid JSON."""
    report = evaluate_upsampling(low_res, real, real)
    for name in ("ours", "real images"):
        assert report.rows[name]["consistency"].value == PSNR_CAP and report.rows[name]["sharpness"].value == 1.0
    ours = report.rows["ours"]
    assert ours["psnr"].value == PSNR_CAP and ours["ssim"].value == pytest.approx(1.0)
    json.dumps(report.to_dict(), allow_nan=False)


def test_scores_hold_only_what_was_measured(low_res, ours, real):
    scores = evaluate_upsampling(low_res, ours, real).to_dict()
    assert scores["n"] == 8 and set(scores) == {"n", "psnr_gain", "bicubic", "ours", "real images"}
    assert set(scores["ours"]) == {"psnr", "ssim", "sharpness", "consistency"}
    assert set(scores["real images"]) == {"sharpness", "consistency"}
    assert set(scores["ours"]["psnr"]) == {"value", "low", "high"}


def test_the_table_shows_numbers_with_their_intervals(low_res, ours, real):
    report = evaluate_upsampling(low_res, ours, real)
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in str(report.table()).splitlines())
    assert header == ["images", "PSNR (dB)", "SSIM", "sharpness", "consistency (dB)", "n"]
    found = report.rows["bicubic"]["psnr"]
    assert rows[0][:2] == ["bicubic", f"{found.value:.2f} ({found.low:.2f} – {found.high:.2f})"]
    assert rows[2] == ["real images", "–", "–", "1.000", "60.00", "8"]


@pytest.fixture
def grids(monkeypatch):
    """The cells, labels, columns and cell sizes of the grids that are drawn."""
    drawn = []
    monkeypatch.setattr(fidelity, "image_grid", lambda *given: drawn.append(given) or image_grid(*given))
    return drawn


def test_the_image_shows_input_bicubic_ours_and_original(tmp_path, grids, low_res, ours, real):
    """Rows are the first images; every pixel is where it belongs, four times as large."""
    scores, images = upsampling_sections(evaluate_upsampling(low_res, ours, real), low_res, ours, real, CAPTIONS)
    columns = [low_res.repeat(4, 1).repeat(4, 2), bicubic_upsample(low_res, (32, 32)), ours, real]
    ((cells, labels, *form),) = grids
    assert np.array_equal(cells, np.stack(columns, 1)[:GRID_ROWS].reshape(-1, 32, 32, 3)) and form == [4, 128]
    assert labels[4:8] == [f"[input] {CAPTIONS[1]}", "[bicubic]", "[ours]", "[original]"]
    assert "The first 6" in images.text and "(8 × 8," in images.text and "crops" not in images.text
    assert "bicubic, ours, original." in images.text and "ours − bicubic" in scores.text
    (figure,) = images.figures
    grid = np.asarray(figure.image)
    assert grid.shape[1] == MARGIN + len(columns) * (128 + MARGIN)
    height = (grid.shape[0] - MARGIN) // GRID_ROWS
    for i in range(GRID_ROWS):
        for k, column in enumerate(columns):
            top, left = MARGIN + i * height, MARGIN + k * (128 + MARGIN)
            np.testing.assert_array_equal(grid[top : top + 128, left : left + 128][::4, ::4], column[i])
    Report([scores, images]).write(str(tmp_path), "Upsampler")
    (link,) = re.findall(r"!\[.*?\]\((.*?)\)", (tmp_path / "report.md").read_text(encoding="utf-8"))
    assert (tmp_path / link).exists()


def test_of_large_images_the_same_center_is_shown_in_whole_pixels_of_the_input():
    """Of 100 pixels upsampled 3 times, 85 fit into 256."""
    low_res = np.random.RandomState(0).randint(0, 256, (2, 100, 100, 3)).astype(np.uint8)
    ours = low_res.repeat(3, 1).repeat(3, 2)
    images = upsampling_sections(evaluate_upsampling(low_res, ours, ours), low_res, ours, ours, ["", ""])[1]
    assert "Center crops of 255 × 255" in images.text and "The first 2 images" in images.text
    (figure,) = images.figures
    grid = np.asarray(figure.image)
    shown = [grid[MARGIN : MARGIN + 255, left : left + 255] for left in (MARGIN, MARGIN + 2 * (255 + MARGIN))]
    for cell in shown:
        np.testing.assert_array_equal(cell[::3, ::3], low_res[0, 7:92, 7:92])
        np.testing.assert_array_equal(cell, ours[0, 21:276, 21:276])


def test_images_that_do_not_belong_together_are_refused(low_res, ours, real):
    flat = np.full_like(real, 7)
    for action, words in (
        (lambda: evaluate_upsampling(low_res[:5], ours, real), "8 images for 5 low-resolution"),
        (lambda: evaluate_upsampling(low_res[:, :7], ours, real), "cannot be an upsampling"),
        (lambda: evaluate_upsampling(low_res, ours, real[:, :16, :16]), "same size"),
        (lambda: evaluate_upsampling(low_res, ours, real[:4]), "4 images for 8"),
        (lambda: evaluate_upsampling(low_res[:1], ours[:1], real[:1]), "at least 2"),
        (lambda: evaluate_upsampling(low_res, ours, flat), "single color"),
        (
            lambda: upsampling_sections(evaluate_upsampling(low_res, ours, real), low_res, ours, real, ["one"]),
            "1 captions for 8",
        ),
    ):
        with pytest.raises(InputError, match=words):
            action()
