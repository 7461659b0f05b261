"""The notebook scripts/tour.ipynb: it runs, and what is committed is executed and small."""

import json
import re

import pytest
from checkpoint_making import make_file
from script_running import ROOT

TOUR = ROOT / "scripts" / "tour.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
    return {kind for output in cell["outputs"] for kind in output.get("data", ())}


def printed(cells):
    return "".join(text for cell in cells for output in cell["outputs"] for text in output.get("text", ()))


def test_the_committed_notebook_is_executed_and_small():
    """In order, from a fresh start, without an error, and with its pictures."""
    assert TOUR.stat().st_size <= 500_000
    cells = code_cells(json.loads(TOUR.read_text(encoding="utf-8")))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in kinds(cell) for cell in cells) == 6
    assert all(output["output_type"] != "error" for cell in cells for output in cell["outputs"])
    assert "stderr" not in {output.get("name") for cell in cells for output in cell["outputs"]}
    assert "image/jpeg" not in set().union(*map(kinds, cells))  # each picture once


def test_the_notebook_runs(tmp_path, monkeypatch):
    """With a tiny network, whose loss falls in a few updates, and few steps."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'diff_dalle[test]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'diff_dalle[test]'")
    import nbformat

    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    settings = {"TOUR_MODEL": make_file(tmp_path, text_length=32), "TOUR_STEPS": "3", "TOUR_UPDATES": "12"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(TOUR, 4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = code_cells(notebook)
    assert sum("image/png" in kinds(cell) for cell in cells) == 6
    before, after = map(float, re.findall(r"held-out loss ([\d.]+)", printed(cells)))
    assert after < before
    assert float(re.search(r"largest difference (\S+)", printed(cells))[1]) < 1e-5
