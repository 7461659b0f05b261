"""Reports: Markdown that links the pictures it saved."""

import re

import numpy as np
import pytest
from PIL import Image

from diff_dalle.evaluation.report import Section, line_plot, markdown_table, write_report


def test_a_report_links_only_pictures_that_exist(tmp_path):
    """Title, sections in order, text kept; every link leads to a readable picture beside the report."""
    picture = Image.new("RGB", (8, 8), (1, 2, 3))
    path = tmp_path / "deep" / "report.md"
    write_report(
        str(path), "Run", [Section("Scores", "all good"), Section("Grid", picture=picture, picture_name="grid.png")]
    )
    text = path.read_text(encoding="utf-8")
    assert text.index("# Run") < text.index("## Scores") < text.index("all good") < text.index("## Grid")
    (link,) = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert Image.open(path.parent / link).getpixel((0, 0)) == (1, 2, 3)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["grid.png", "report.md"]


def test_tables_keep_their_columns():
    """Every line has the same number of cells, also when a cell holds a bar."""
    table = markdown_table(["name", "value"], [["a|b", 0.123456], ["c", 7]])
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()] == [3, 3, 3, 3]
    assert "0.1235" in table and "| 7 |" in table


@pytest.mark.parametrize("line", [[(0, 0.0), (10, 1.0)], [(5, 0.5)]])
def test_a_plot_draws_its_points(line):
    """The first line's colour appears where high and low values belong; one point alone is drawn too."""
    pixels = np.asarray(line_plot({"score": line}, "step"))
    rows, columns = np.nonzero((pixels[:, :480] == (0, 114, 178)).all(2))
    if len(line) == 2:
        assert rows[columns.argmin()] > rows[columns.argmax()]  # rising to the right
    assert len(rows) > 10
