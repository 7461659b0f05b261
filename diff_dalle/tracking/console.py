"""Progress on the terminal: a bar, and a table at each log step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

from .scalar_table import format_table
from .tracker import Run, Tracker


class ConsoleTracker(Tracker):
    """A progress bar on stderr, tables and notes on stdout.

    If stderr is not a terminal, there is no bar, and a line with the elapsed and remaining time precedes each
    table.
    """

    def __init__(self, run: Run):
        self.first_step, self.total_steps = run.step, run.total_steps
        self.started = time.monotonic()
        self.bar = tqdm(
            initial=run.step, total=run.total_steps, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.progress(step)
        if self.bar.disable:
            self.note(self._timing(step))
        self.note(format_table({"step": step, **scalars}))

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

    def note(self, text: str) -> None:
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def finish(self) -> None:
        self.bar.close()
