"""Plots: lines, error bars and references are where their numbers say; without matplotlib, a sentence says so."""

import sys

import numpy as np
import pytest
from PIL import Image

from diff_dalle.config import InputError
from diff_dalle.evaluation import plots
from diff_dalle.evaluation.plots import COLORS, REFERENCE, line_plot, require_matplotlib, training_sections


def find(image, color):
    """Rows and columns of the pixels of a color inside the axes, without tick labels and legend."""
    rgb = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
    return np.nonzero((np.asarray(image)[:460, 100:800] == rgb).all(2))


@pytest.mark.parametrize("line", [[(0, 0.0), (10, 1.0)], [(5, 0.5)], [(0, 0.0, 0.0, 0.2), (10, 1.0, 0.8, 1.0)]])
def test_a_plot_draws_its_points(line):
    """Low values are below high ones; a single point is drawn too."""
    rows, columns = find(line_plot({"score": line}, "step"), COLORS[0])
    assert len(rows) > 10
    if len(line) == 2:
        assert rows[columns.argmin()] > rows[columns.argmax()] + 200  # rising to the right


def test_error_bars_reach_from_low_to_high():
    heights = []
    for interval in ((), (0.2, 0.6), (0.0, 1.0)):
        rows, _ = find(line_plot({"score": [(0, 0.4, *interval), (1, 0.4, *interval)]}, "step"), COLORS[0])
        heights.append(int(np.ptp(rows)))
    none, narrow, wide = heights
    assert none < 20 and wide - narrow == pytest.approx(0.6 * (wide / 1.0), rel=0.1)


def test_a_point_outside_its_interval_by_rounding_is_drawn():
    find(line_plot({"score": [(0, 0.0, 1e-17, 0.5), (1, 1.0, 0.5, 1.0 - 1e-16)]}, "step"), COLORS[0])


def test_lines_and_references_have_colors_of_their_own_and_a_legend():
    series = {str(k): [(0, k / 10), (1, k / 10)] for k in range(5)}
    plain, image = line_plot(series, "step"), line_plot(series, "step", references={"chance": 0.77})
    heights = [find(image, color)[0].mean() for color in (*COLORS[:5], REFERENCE)]
    assert heights[:5] == sorted(heights[:5], reverse=True) and heights[5] < heights[4]
    assert len(find(plain, REFERENCE)[0]) == 0
    legend = np.asarray(image)[:, 900:]
    assert all((legend == [int(c[k : k + 2], 16) for k in (1, 3, 5)]).all(2).any() for c in COLORS[:5])


def test_the_same_numbers_give_the_same_pixels():
    """Plots of a resumed run equal those of an uninterrupted one."""
    first, second = (np.asarray(line_plot({"a": [(0, 0.1), (3, 0.9)]}, "step", "score")) for _ in range(2))
    assert np.array_equal(first, second) and first.dtype == np.uint8 and first.shape[2] == 3


def test_plots_leave_pyplot_alone(monkeypatch):
    """pyplot holds global state, and its backend may need a display."""
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # which other packages import
    line_plot({"a": [(0, 0.1)]}, "step")
    assert "matplotlib.pyplot" not in sys.modules


def test_missing_matplotlib_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for action in (require_matplotlib, lambda: line_plot({"a": [(0, 0.1)]}, "step")):
        with pytest.raises(InputError, match=r"matplotlib, .* not installed .*: pip install 'diff_dalle\[plot\]'"):
            action()


def test_training_curves_plot_the_quartiles_that_were_logged(tmp_path):
    path = tmp_path / "progress.csv"
    header = ["step", "loss", *(f"held_out/loss_q{k}" for k in range(4)), "held_out/caption_swap_gap_q3"]
    rows = [[1, 0.9, "", "", "", "", ""], [10, 0.8, 0.4, 0.3, 0.2, 0.1, -0.01], [20, 0.7, 0.3, 0.2, 0.1, 0.05, 0.02]]
    path.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]))
    loss, gap = (figure for section in training_sections(str(path)) for figure in section.figures)
    assert (loss.name, gap.name) == ("loss.png", "caption_swap_gap.png")
    heights = [find(loss.image, color)[0].mean() for color in COLORS[:4]]
    assert heights == sorted(heights)  # q0 is the highest
    assert len(find(gap.image, COLORS[0])[0]) > 10 and len(find(gap.image, COLORS[1])[0]) == 0
    path.write_text("step,loss\n1,0.9\n")
    assert training_sections(str(path)) == []


def test_training_curves_are_of_the_values_that_were_logged(tmp_path, monkeypatch):
    """By quartile. Infinite losses are left out; where all gaps are negative, the axis ends at 0."""
    drawn, path = [], tmp_path / "progress.csv"
    plot = Image.new("RGB", (1, 1))
    monkeypatch.setattr(plots, "line_plot", lambda series, x, y, span: drawn.append((series, span)) or plot)
    names = [*(f"held_out/loss_q{k}" for k in range(4)), "held_out/caption_swap_gap_q0"]
    rows = [["step", *names], [1, *[""] * 5], [10, 0.5, 0.3, 0.2, 0.1, -2e-4], [20, "inf", "nan", 0.1, 0.05, -1e-4]]
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    sections = training_sections(str(path))
    names = [(figure.name, figure.image) for section in sections for figure in section.figures]
    assert names == [("loss.png", plot), ("caption_swap_gap.png", plot)]
    losses = {"q0": [(10, 0.5)], "q1": [(10, 0.3)], "q2": [(10, 0.2), (20, 0.1)], "q3": [(10, 0.1), (20, 0.05)]}
    assert drawn == [(losses, (0, 0.525)), ({"q0": [(10, -2e-4), (20, -1e-4)]}, (-2e-4, 1))]
    path.write_text("step,loss\n1,0.9\n")
    assert training_sections(str(path)) == []
