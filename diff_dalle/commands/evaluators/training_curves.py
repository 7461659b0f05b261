"""Held-out loss and caption-swap gap over training, from the run's progress.csv."""

from __future__ import annotations

from ...evaluation.training_curves import training_sections
from .context import Context
from .contract import PROGRESS, Evaluator, Findings


def run(context: Context) -> Findings:
    return Findings(training_sections(context.settings.progress))


TRAINING_CURVES = Evaluator("training_curves", (PROGRESS,), run, plots=True)
