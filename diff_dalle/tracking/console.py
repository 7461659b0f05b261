"""Progress on the terminal: a bar, and a table at each log step, in color if colors are wanted."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from typing import TextIO

import torch
from tqdm import tqdm

from .tracker import Run, Tracker, format_table

DIM, BOLD, CYAN, RESET = "\033[2m", "\033[1m", "\033[36m", "\033[0m"


def wants_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colors, and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(table: str) -> str:
    """The text of ``format_table`` with dim rules, cyan values, and losses in bold."""

    def paint(line: str) -> str:
        if not line.startswith("|"):
            return f"{DIM}{line}{RESET}"
        _, name, value, _ = re.split(r"\|", line)
        bold = BOLD if re.search(r"(^|[ /_])loss\b", name) else ""
        return f"{DIM}|{RESET}{bold}{name}{RESET}{DIM}|{RESET}{bold}{CYAN}{value}{RESET}{DIM}|{RESET}"

    return "\n".join(map(paint, table.splitlines()))


class ConsoleTracker(Tracker):
    """A progress bar on stderr with the rate, the time left and the last loss; tables and notes on stdout, where a line
    follows the first step.

    If stderr is not a terminal, there is no bar, and a line with the elapsed and remaining time precedes each
    table. If stdout is one, tables are ``painted``.
    """

    def __init__(self, run: Run):
        self.first_step, self.total_steps = run.step, run.total_steps
        self.started = self.last = time.monotonic()
        self.colored = wants_color(sys.stdout)
        self.bar = tqdm(
            initial=run.step, total=run.total_steps, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.bar.update(step - self.bar.n)
        if self.bar.disable:
            self.note(self._timing(step))
        if (loss := scalars.get("loss")) is not None:
            self.bar.set_postfix(loss=f"{loss:.3g}", refresh=False)
        table = format_table({"step": step, **scalars})
        self.note(painted(table) if self.colored else table)

    def _timing(self, step: int) -> str:
        """``step 200 of 1,000, 03:12 elapsed, 12:48 remaining``, for output without a terminal."""
        elapsed = time.monotonic() - self.started
        if self.total_steps is None:
            return f"step {step:,}, {tqdm.format_interval(elapsed)} elapsed"
        remaining = elapsed / max(step - self.first_step, 1) * max(self.total_steps - step, 0)
        times = f"{tqdm.format_interval(elapsed)} elapsed, {tqdm.format_interval(remaining)} remaining"
        return f"step {step:,} of {self.total_steps:,}, {times}"

    def progress(self, step: int) -> None:
        self.bar.update(step - self.bar.n)
        if step <= self.first_step + 2:
            self.note(self._first_steps(step - self.first_step))

    def _first_steps(self, count: int) -> str:
        """What the first one or two steps took, since the table of losses may be many slow steps away."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        if count == 1:
            cuda = torch.cuda.is_initialized()
            memory = f" and {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the GPU" if cuda else ""
            return f"The first step took {seconds:.1f} s{memory}."
        if self.total_steps is None:
            return f"The second step took {seconds:.1f} s."
        remaining = tqdm.format_interval(seconds * (self.total_steps - self.first_step - count))
        return f"The second step took {seconds:.1f} s: at this rate, {remaining} remain."

    def note(self, text: str) -> None:
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def finish(self) -> None:
        self.bar.close()
