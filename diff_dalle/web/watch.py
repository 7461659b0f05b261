"""The page of ``watch.py``: runs as their folders show them, in the browser, looked at again and again."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

from .. import storage
from ..commands.watch import WatchConfig
from ..config import InputError
from ..evaluation.plots import COLORS
from .door import BODY_SECONDS, BodyLimit, Door
from .gradio_setup import appearance, load_gradio, uploads_folder
from .watch_run import WatchedRun, labels, read_watched, thinned

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
MOST_POINTS = 400  # of a line: about one for each pixel of a plot
_PNG = b"\x89PNG\r\n\x1a\n"
WIDE = 640  # pixels up to which a grid is magnified
MAX_GRID = 32 * 2**20  # bytes


@dataclass(frozen=True)
class Plot:
    """A plot of one series of each run.

    name:     of the series, after the name of the network where a run trains several.
    held_out: whether the run also logs it for held-out samples, under ``held_out/``.
    """

    title: str
    name: str
    held_out: bool = False


LOSSES = (
    Plot("Loss", "loss", True),
    Plot("Caption-swap gap, held-out", "held_out/caption_swap_gap"),
    Plot("Loss q0, least noise", "loss_q0", True),
    Plot("Loss q1", "loss_q1", True),
    Plot("Loss q2", "loss_q2", True),
    Plot("Loss q3, most noise", "loss_q3", True),
)
EXPLANATION = (
    "q0 to q3 are the quarters of the timesteps. The caption-swap gap is how much the held-out loss grows when "
    "captions are swapped between images: above 0, the model uses its text."
)
SPEED = (
    Plot("Samples per second", "samples_per_second"),
    Plot("Gradient norm", "grad_norm"),
    Plot("Learning rate", "lr"),
)
PLOTS = LOSSES + SPEED
Line = list[tuple[float, float]]


def lines(plot: Plot, runs: Mapping[str, WatchedRun], by: str, samples: str) -> dict[str, Line]:
    """The lines of a plot by their labels.

    runs:    by label.
    by:      the horizontal axis, "step" or "samples".
    samples: whose losses: "training", "held-out", or "both".
    """
    found: dict[str, Line] = {}
    for label, run in runs.items():
        for part in ("", *(part for part in run.parts if part)):
            name = f"{label} {part.rstrip('/')}".strip()
            if not plot.held_out or samples != "held-out":
                found[name] = run.curve(part + plot.name, by)
            if plot.held_out and samples != "training":
                found[f"{name}, held-out"] = run.curve(f"{part}held_out/{plot.name}", by)
    return {name: thinned(points, MOST_POINTS) for name, points in found.items() if points}


def value_range(found: Mapping[str, Line]) -> tuple[float, float] | None:
    """The vertical range: of all points, or, where the first tenth of the longest line would flatten the rest to less
    than a tenth, of those after it; None for none."""
    points = [point for line in found.values() for point in line]
    start = 0.1 * max((x for x, _ in points), default=0.0)
    late = [y for x, y in points if x >= start]
    if not late:
        return None
    low, high = min(late), max(late)
    all_low, all_high = min(y for _, y in points), max(y for _, y in points)
    if all_high - all_low <= 10 * (high - low):
        low, high = all_low, all_high
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def duration(seconds: float) -> str:
    """``duration(3700) == "1 h 2 min"``; the two largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((i for i, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2] if count) or "0 s"


def status(runs: Mapping[str, WatchedRun | InputError]) -> str:
    """How far each run is: HTML."""
    return f'<div class="runs">{"".join(_card(label, run) for label, run in runs.items())}</div>'


def _card(label: str, run: WatchedRun | InputError) -> str:
    title = f"<h3>{html.escape(label)}</h3>"
    if isinstance(run, InputError):
        return f'<section class="run">{title}<p class="note">{html.escape(str(run))}</p></section>'
    state, end = "stopped", run.last_step
    if end is not None and run.step >= end:
        state = "finished"
    elif run.running:
        state = "training"
    rows = [
        ("step", f"{run.step:,}" + (f" of {end:,}" if end is not None else "")),
        ("samples", f"{run.samples:,}"),
        ("samples per second", f"{run.samples_per_second:,.4g}" if run.samples_per_second else "–"),
    ]
    if state == "training":
        rows.append(("time left", "–" if run.seconds_left is None else duration(run.seconds_left)))
    for part in run.parts:
        losses = run.series.get(f"{part}held_out/loss")
        if losses:
            step, lowest = min(losses, key=lambda point: point[1])
            rows.append((f"{part.rstrip('/')} lowest held-out loss".strip(), f"{lowest:.4g} at step {step:,}"))
    cells = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in rows)
    bar = ""
    if end:
        bar = f'<progress max="{end}" value="{min(run.step, end)}" aria-label="steps done"></progress>'
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in run.notes)
    kind = f'<span class="kind">{html.escape(", ".join(filter(None, (run.kind, state))))}</span>'
    return f'<section class="run {state}">{title}{kind}{bar}<dl>{cells}</dl>{notes}</section>'


def grid_names(runs: Mapping[str, WatchedRun]) -> list[str]:
    """The names of the image grids of any run."""
    return sorted({name for run in runs.values() for name in run.grids})


def grid_steps(runs: Mapping[str, WatchedRun], name: str) -> list[int]:
    """The steps at which any run has written a grid of this name."""
    return sorted({step for run in runs.values() for step in run.grids.get(name, {})})


def grids_at(runs: Mapping[str, WatchedRun], name: str, step: int) -> str:
    """For each run, its last grid of this name up to a step: HTML."""
    figures = []
    for label, run in runs.items():
        last = max((each for each in run.grids.get(name, {}) if each <= step), default=None)
        if last is None:
            continue
        caption = f"{html.escape(label)}, step {last:,}"
        figures.append(
            f"<figure tabindex=0>{_image(run.grids[name][last], caption)}<figcaption>{caption}</figcaption></figure>"
        )
    return f'<div class="grids">{"".join(figures)}</div>' if figures else "<p>No image grid up to this step.</p>"


def _image(path: str, caption: str) -> str:
    try:
        data = storage.read_bytes(path, 0, MAX_GRID + 1)
    except InputError as error:  # removed meanwhile
        return f'<p class="note">{html.escape(str(error))}</p>'
    if len(data) > MAX_GRID or not data.startswith(_PNG):
        return f'<p class="note">{html.escape(path)} is no PNG file of at most {MAX_GRID >> 20} MiB.</p>'
    own = int.from_bytes(data[16:20], "big")  # pixels wide, of the PNG's head
    style = f"width: max({own}px, round(down, min(100%, {WIDE}px), {own}px))"  # a whole multiple
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<img alt="image grid, {caption}" style="{style}" src="{source}">'


def fingerprint(runs: Mapping[str, WatchedRun]) -> Sequence[object]:
    """Equal for equal plots: they are drawn again only where something new was logged."""
    return [(label, run.step, sum(map(len, run.series.values()))) for label, run in runs.items()]


# ----------------------------------------------------------------------------------------------------------- the page


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
        **appearance(CSS),
        share=False,
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
