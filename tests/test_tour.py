"""The notebook scripts/tour.ipynb: it runs, and what is committed is executed and small."""

import ast
import json
import re
import sys
from types import ModuleType
from unittest import mock

from checkpoint_making import make_file
from script_running import ROOT

from diff_dalle import SAMPLERS

TOUR = ROOT / "scripts" / "tour.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
    return {kind for output in cell["outputs"] for kind in output.get("data", ())}


def test_the_committed_notebook_is_executed_and_small():
    """In order, from a fresh start, without an error, and with its pictures."""
    assert TOUR.stat().st_size <= 500_000
    cells = code_cells(json.loads(TOUR.read_text(encoding="utf-8")))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in kinds(cell) for cell in cells) == 6
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
    assert "stderr" not in {output.get("name") for cell in cells for output in cell["outputs"]}
    assert "image/jpeg" not in set().union(*map(kinds, cells))  # each picture once


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """With a tiny network, whose loss falls in a few updates, and few steps."""
    settings = {"TOUR_MODEL": make_file(tmp_path, text_length=32), "TOUR_STEPS": "3", "TOUR_UPDATES": "12"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # without a file
    names, pictures = {"__name__": "__main__"}, 0
    with mock.patch.dict(SAMPLERS):
        for cell in code_cells(json.loads(TOUR.read_text(encoding="utf-8"))):
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, TOUR, "exec"), names)
            shown = eval(compile(ast.Expression(last.value), TOUR, "eval"), names) if last else None
            pictures += hasattr(shown, "_repr_png_")
    assert pictures == 6
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"held-out loss ([\d.]+)", said))
    assert after < before
    assert float(re.search(r"largest difference (\S+)", said)[1]) < 1e-5
