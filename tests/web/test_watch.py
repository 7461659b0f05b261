"""The page of ``watch.py``: what it shows, its command line, and the page itself in a browser."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from web_making import inaccessible

from diff_dalle.commands.watch import WatchConfig, parse_watch
from diff_dalle.config import InputError
from diff_dalle.web.watch import PLOTS, duration, fingerprint, grid_steps, grids_at, lines, status, value_range
from diff_dalle.web.watch_run import read_watched

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LOSS = next(plot for plot in PLOTS if plot.name == "loss")


def write_run(folder, steps=3, prefix="", scale=1.0):
    """A run with a log and a grid at every tenth step."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    rows = []
    for step in range(10, 10 * steps + 1, 10):
        row = {f"{prefix}loss": scale / step, f"{prefix}loss_q0": 0.5 * scale / step}
        rows.append({"step": step, **row, "samples": 4 * step, "samples_per_second": 2.0})
        rows.append({"step": step, f"{prefix}held_out/loss": 2 * scale / step})
        picture = Image.fromarray(np.full((4, 4, 3), 20 * step // 10, np.uint8))
        picture.save(folder / "samples" / f"samples_{step:06d}.png")
    (folder / "progress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_lines_are_those_of_runs_networks_and_samples(tmp_path):
    one, two = (read_watched(write_run(tmp_path / name, prefix=prefix)) for name, prefix in (("a", ""), ("b", "u0/")))
    runs = {"a": one, "b": two}
    assert list(lines(LOSS, runs, "step", "training")) == ["a", "b u0"]
    assert list(lines(LOSS, runs, "step", "held-out")) == ["a, held-out", "b u0, held-out"]
    both = lines(LOSS, runs, "samples", "both")
    assert list(both) == ["a", "a, held-out", "b u0", "b u0, held-out"]
    assert both["a"] == [(40, 0.1), (80, 0.05), (120, 1 / 30)] and both["b u0, held-out"][0] == (40, 0.2)
    speed = next(plot for plot in PLOTS if plot.name == "samples_per_second")
    assert lines(speed, runs, "step", "held-out") == {
        "a": [(10, 2), (20, 2), (30, 2)],
        "b": [(10, 2), (20, 2), (30, 2)],
    }


def test_the_range_leaves_the_first_fall_out():
    falling = [(float(x), 100.0 if x < 10 else 1 + 0.1 * (x % 2)) for x in range(101)]
    low, high = value_range({"long": falling, "short": falling[:5]})
    assert 0.9 < low < 1 and 1.1 < high < 1.2
    low, high = value_range({"slow": [(float(x), 3 - 0.1 * x) for x in range(11)]})
    assert low < 2 and high > 3
    assert value_range({}) is None
    low, high = value_range({"flat": [(0.0, 3.0)]})
    assert low < 3 < high


def test_durations():
    shown = {0: "0 s", 59.6: "1 min", 61: "1 min 1 s", 3700: "1 h 1 min", 90000: "1 d 1 h", 86400: "1 d"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_the_status_names_progress_and_what_went_wrong(tmp_path):
    """Texts from a folder are never markup."""
    run = read_watched(write_run(tmp_path / "a"))
    coming = replace(run, goals=(110, 0), running=True)  # 80 steps of 4 samples, 2 a second
    text = status({"<b>": run, "gone": InputError("it <is> gone"), "coming": coming})
    assert "&lt;b&gt;" in text and "it &lt;is&gt; gone" in text and "<b>" not in text and "<is>" not in text
    assert "<dd>30</dd>" in text and "<dd>120</dd>" in text and "0.06667 at step 30" in text and "stopped" in text
    assert "training" in text and "<dd>30 of 110</dd>" in text and "<dd>2 min 40 s</dd>" in text


def test_grids_are_the_last_ones_up_to_a_step(tmp_path):
    runs = {"a": read_watched(write_run(tmp_path / "a", 3)), "b<": read_watched(write_run(tmp_path / "b", 1))}
    assert grid_steps(runs, "samples") == [10, 20, 30] and grid_steps(runs, "none") == []
    text = grids_at(runs, "samples", 25)
    assert "a, step 20<" in text and "b&lt;, step 10<" in text and text.count("<img ") == 2
    assert "a, step 20<" in grids_at(runs, "samples", 20) and "No image grid" in grids_at(runs, "samples", 5)
    (tmp_path / "a/samples/samples_000020.png").write_bytes(b"<svg onload=alert()>")
    (tmp_path / "b/samples/samples_000010.png").unlink()
    text = grids_at(runs, "samples", 25)
    assert "is no PNG file" in text and "<svg" not in text and "<img" not in text and text.count("note") == 2


def test_plots_are_drawn_again_only_when_something_is_new(tmp_path):
    first = fingerprint({"a": read_watched(write_run(tmp_path))})
    assert first == fingerprint({"a": read_watched(write_run(tmp_path))})
    assert first != fingerprint({"a": read_watched(write_run(tmp_path, 4))})


def test_log_directories_are_given_without_a_flag():
    assert parse_watch(["a,b", "c", "--port", "0"]) == WatchConfig(("a,b", "c"), port=0)
    assert parse_watch(["--logdirs", "a,b"]).logdirs == ("a", "b")
    assert parse_watch(["a"]).host == "127.0.0.1"
    wrong = {
        "no run is given": [],
        "logdirs is given twice": ["a", "--logdirs", "b"],
        "port is 70000": ["a", "--port", "70000"],
        "refresh_seconds is 0.5": ["a", "--refresh_seconds", "0.5"],
        "must name each run once": ["--logdirs", "a,a"],
        "unknown flag or argument": ["--port", "1", "a"],
    }
    for words, argv in wrong.items():
        with pytest.raises(InputError, match=words):
            parse_watch(argv)


def test_the_page_in_a_browser(tmp_path):
    """Two runs, at the width of a phone: progress, plots and grids; what is logged later appears by itself; a step of
    before is chosen; nothing is asked of another server."""
    gradio = pytest.importorskip("gradio", reason="gradio is not installed: pip install 'diff_dalle[web]'")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    from diff_dalle.web.watch import create_page, launch_page

    del gradio
    folders = (write_run(tmp_path / "first"), write_run(tmp_path / "second", 2, scale=2.0))
    config = WatchConfig(folders, refresh_seconds=1, port=0)
    page = create_page(config)
    launch_page(page, config)
    try:
        with playwright.sync_playwright() as tools:
            browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            view = browser.new_page(viewport={"width": 390, "height": 844})
            asked = []
            view.on("request", lambda request: asked.append(request.url))
            view.goto(page.local_url)
            view.get_by_text("first, step 30").wait_for(timeout=60_000)
            assert view.locator(".run").count() == 2 and "30" in view.locator(".run").first.inner_text()
            view.locator("canvas, svg.marks").nth(1).wait_for(timeout=60_000)
            assert view.evaluate("document.documentElement.scrollWidth") <= 390
            assert not inaccessible(view)
            write_run(tmp_path / "first", 4)
            view.get_by_text("first, step 40").wait_for(timeout=60_000)  # the newest is shown
            sizes = view.locator(".grids img").evaluate_all("all => all.map(each => each.width / each.naturalWidth)")
            assert sizes and all(size >= 1 and size == int(size) for size in sizes)
            view.get_by_label("Step", exact=True).click()
            assert view.get_by_role("option").all_inner_texts()[1:] == ["40", "30", "20", "10"]
            view.get_by_role("option", name="10", exact=True).click()
            view.get_by_text("first, step 10").wait_for(timeout=60_000)
            shutil.rmtree(tmp_path / "second")
            view.get_by_text("holds no run to watch").wait_for(timeout=60_000)
            assert view.locator(".run").count() == 2
            assert view.get_by_text("first, step 10").count() == 1  # looking again does not change the step
            browser.close()
        assert not [url for url in asked if not url.startswith((page.local_url, "data:", "blob:"))]
    finally:
        page.close()


def test_the_page_fetches_nothing_for_others(tmp_path):
    """gradio would read files of this machine and of the web where a request names them."""
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'diff_dalle[web]'")
    from page_client import Visitor, send, uploaded_file

    from diff_dalle.web.watch import create_page, launch_page

    page = create_page(config := WatchConfig((write_run(tmp_path / "a"), write_run(tmp_path / "b")), port=0))
    launch_page(page, config)
    try:
        visitor = Visitor(page.local_url.rstrip("/"))
        for path in ("http://example.org/picture.png", str(tmp_path / "a" / "progress.jsonl")):
            visitor.values["Runs"] = [uploaded_file(path)]
            assert visitor.join("Runs", "input")[0] == 403
            assert send(f"{visitor.prefix}/file={path}")[0] == 404
        visitor.values["Runs"] = ["b"]
        assert "b" in str(visitor.fire("Runs", "input")[-1])
    finally:
        page.close()


def test_only_the_address_is_printed(tmp_path, monkeypatch, capfd):
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'diff_dalle[web]'")
    from diff_dalle.web.watch import serve_watch

    class Interrupted:
        def wait(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("diff_dalle.web.watch.Event", Interrupted)
    serve_watch(WatchConfig((write_run(tmp_path),), port=0))
    out, err = capfd.readouterr()
    assert out.startswith("http://127.0.0.1:") and out.count("\n") == 1 and not err


def test_the_page_needs_runs():
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'diff_dalle[web]'")
    from diff_dalle.web.watch import create_page

    with pytest.raises(InputError, match="nowhere holds no run"):
        create_page(WatchConfig(("nowhere",)))
