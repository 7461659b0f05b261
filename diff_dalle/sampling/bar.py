"""The progress bar of a stage: its sampling steps, so that rate and remaining time are there after the first few."""

from __future__ import annotations

import sys

from tqdm import tqdm

from .stage import Progress, Watch


class StepsBar:
    """A bar on stderr where that is a terminal or a notebook's.

    images:  that all processes make. batches: of this process, of which each takes the same number of steps.
    shown:   False = no bar anywhere. watch: called after every step too.
    """

    def __init__(self, title: str, images: int, batches: int, shown: bool, watch: Watch | None = None):
        self.watch, self.images, self.batches, self.made, self.finished, self.steps = watch, images, batches, 0, 0, 1
        visible = shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self.bar = tqdm(total=batches, desc=title, unit="step", dynamic_ncols=True, disable=not visible)
        self._tell()

    def __enter__(self) -> StepsBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def step(self, progress: Progress) -> None:
        """After each step of a batch; stages without steps take one for each batch."""
        self.steps, self.bar.total = progress.steps, self.batches * progress.steps
        self.bar.update(min(self.finished * self.steps + progress.step, self.bar.total) - self.bar.n)
        if self.watch:
            self.watch(progress)

    def batch(self, images: int) -> None:
        """After each batch, of so many images of all processes together."""
        self.made, self.finished = min(self.made + images, self.images), self.finished + 1
        self._tell()
        self.bar.update(self.finished * self.steps - self.bar.n)

    def _tell(self) -> None:
        self.bar.set_postfix_str(f"{self.made} of {self.images} images", refresh=False)
