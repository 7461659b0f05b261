"""What the page of ``watch.py`` shows of runs, as tables of points and as HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import storage
from ..config import InputError
from .watch_run import WatchedRun, thinned

MOST_POINTS = 400  # of a line: about one for each pixel of a plot
PNG = b"\x89PNG\r\n\x1a\n"
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
    if len(data) > MAX_GRID or not data.startswith(PNG):
        return f'<p class="note">{html.escape(path)} is no PNG file of at most {MAX_GRID >> 20} MiB.</p>'
    own = int.from_bytes(data[16:20], "big")  # pixels wide, of the PNG's head
    style = f"width: max({own}px, round(down, min(100%, {WIDE}px), {own}px))"  # a whole multiple
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<img alt="image grid, {caption}" style="{style}" src="{source}">'


def fingerprint(runs: Mapping[str, WatchedRun]) -> Sequence[object]:
    """Equal for equal plots: they are drawn again only where something new was logged."""
    return [(label, run.step, sum(map(len, run.series.values()))) for label, run in runs.items()]
