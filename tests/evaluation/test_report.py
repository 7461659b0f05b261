"""Reports: Markdown that links the images saved beside it."""

import re
from pathlib import Path

from PIL import Image

from diff_dalle.evaluation.report import Figure, Report, Section, markdown_table


def test_a_report_links_only_images_that_exist(tmp_path):
    """Title, sections in order, text kept; every link leads to a readable image beside the report."""
    image = Image.new("RGB", (8, 8), (1, 2, 3))
    report = Report([Section("Scores", ["all good"]), Section("Grid", [Figure("grid.png", image)])])
    path = Path(report.write(str(tmp_path / "deep"), "Run"))
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
