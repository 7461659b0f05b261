"""The page of ``watch.py``: runs as their folders show them, in the browser, looked at again and again."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

from ..commands.watch import WatchConfig
from ..config import InputError
from ..evaluation.plots import COLORS
from . import look
from .door import BODY_SECONDS, BodyLimit, Door
from .uploads import load_gradio, uploads_folder
from .watch_page import (
    EXPLANATION,
    LOSSES,
    PLOTS,
    SPEED,
    Plot,
    fingerprint,
    grid_names,
    grid_steps,
    grids_at,
    lines,
    status,
    value_range,
)
from .watch_run import WatchedRun, labels, read_watched

BODY_BYTES = 1 << 18
DISK_BYTES = 1 << 24
NEWEST = "newest"
CSS = """
.runs, .grids { display: flex; flex-wrap: wrap; gap: 12px; }
.run { flex: 1 1 260px; border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 12px 16px; }
.run h3 { margin: 0; overflow-wrap: anywhere; }
.run .kind { opacity: 0.75; }
.run progress { margin: 8px 0; }
.run dl { display: grid; grid-template-columns: auto 1fr; gap: 2px 16px; margin: 4px 0; }
.run dt { opacity: 0.75; }
.run dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
.note { overflow-wrap: anywhere; }
.grids figure { flex: 1 1 300px; margin: 0; max-width: 100%; overflow-x: auto; }
.grids img { max-width: none; image-rendering: pixelated; }
"""


def read_watched_runs(logdirs: Sequence[str]) -> dict[str, WatchedRun | InputError]:
    """The runs by their labels; for one that cannot be read, why."""
    found: dict[str, WatchedRun | InputError] = {}
    for label, logdir in zip(labels(logdirs), logdirs, strict=True):
        try:
            found[label] = read_watched(logdir)
        except InputError as error:
            found[label] = error
    return found


def create_page(config: WatchConfig) -> Any:
    """The page as ``gradio.Blocks``. Raises InputError for a folder without a run, and without gradio."""
    uploads_folder()  # known to gradio before it makes anything
    gr = load_gradio()
    import pandas

    for logdir in config.logdirs:
        read_watched(logdir)
    names = labels(config.logdirs)

    def draw(plot: Plot, runs: dict[str, WatchedRun], by: str, samples: str) -> Any:
        found = lines(plot, runs, by, samples)
        rows = [(x, y, label) for label, line in found.items() for x, y in line]
        colors = {label: COLORS[i % len(COLORS)] for i, label in enumerate(found)}
        span = value_range(found)
        return gr.LinePlot(
            pandas.DataFrame(rows, columns=[by, "value", "run"]),
            x=by,
            y="value",
            color="run",
            color_map=colors,
            title=plot.title,
            y_title=" ",
            color_title=" ",
            y_lim=list(span) if span else None,
            visible=bool(rows),
        )

    def refresh(shown, by, samples, name, chosen, steps, drawn):
        found = {label: run for label, run in read_watched_runs(config.logdirs).items() if label in shown}
        runs = {label: run for label, run in found.items() if isinstance(run, WatchedRun)}
        now = [*fingerprint(runs), by, samples]
        plots = [draw(plot, runs, by, samples) if now != drawn else gr.skip() for plot in PLOTS]
        kinds = grid_names(runs)
        name = name if name in kinds else next(iter(kinds), "")
        new, offered = grid_steps(runs, name), gr.skip()
        if chosen != NEWEST and chosen not in new:
            chosen = NEWEST
        if new != steps:  # else it stays open
            choices = [NEWEST, *((f"{step:,}", step) for step in reversed(new))]
            offered = gr.Dropdown(choices=choices, value=chosen, visible=len(new) > 1)
        return [
            status(found),
            gr.Dropdown(choices=kinds, value=name or None, visible=len(kinds) > 1),
            offered,
            grids_at(runs, name, max(new, default=0) if chosen == NEWEST else chosen),
            new,
            now,
            *plots,
        ]

    with gr.Blocks(title=f"diff_dalle: {', '.join(names)}", analytics_enabled=False) as page:
        gr.Markdown("# Runs")
        shown = gr.CheckboxGroup(names, value=names, label="Runs", visible=len(names) > 1)
        cards = gr.HTML()
        steps, drawn = gr.State([]), gr.State([])
        gr.Markdown("## Image grids")
        name = gr.Dropdown([], label="Grid", visible=False)
        chosen = gr.Dropdown([NEWEST], value=NEWEST, label="Step", visible=False)
        picture = gr.HTML()
        gr.Markdown("## Losses")
        with gr.Row():
            samples = gr.Radio(["training", "held-out", "both"], value="training", label="Samples")
            by = gr.Radio(["step", "samples"], value="step", label="Horizontal axis")
        plots = []
        for text, group in ((EXPLANATION, LOSSES), ("## Speed and optimizer", SPEED)):
            gr.Markdown(text)
            with gr.Row():
                plots += [gr.LinePlot(height=260, min_width=320, visible=False) for _ in group]
        timer = gr.Timer(config.refresh_seconds)
        inputs = [shown, by, samples, name, chosen, steps, drawn]
        outputs = [cards, name, chosen, picture, steps, drawn, *plots]
        quietly: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        for event in (page.load, timer.tick, shown.input, by.input, samples.input, name.input, chosen.input):
            event(refresh, inputs, outputs, **quietly)
    return page


def launch_page(page: Any, config: WatchConfig) -> None:
    """Start to serve the page, silently."""
    from starlette.middleware import Middleware

    # Any host name, because the page changes nothing; but gradio fetches what requests name as a file.
    guards = [Middleware(BodyLimit, BODY_BYTES, BODY_SECONDS), Middleware(Door, None, uploads_folder(), DISK_BYTES)]
    page.launch(
        server_name=config.host,
        server_port=config.port or None,
        css=look.CSS + CSS,
        theme=look.theme(),
        footer_links=[],
        share=False,
        ssr_mode=False,
        app_kwargs={"middleware": guards},
        quiet=True,
        prevent_thread_lock=True,
    )


def serve_watch(config: WatchConfig) -> None:
    """Create the page, print its address and serve it until interrupted. Raises InputError as ``create_page``."""
    page = create_page(config)
    launch_page(page, config)
    print(page.local_url.rstrip("/"), flush=True)
    try:
        Event().wait()
    except KeyboardInterrupt:
        page.close(verbose=False)
