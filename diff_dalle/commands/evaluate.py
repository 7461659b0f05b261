"""Evaluation: runs evaluators on a generator, with or without a classifier and upsamplers, and writes a report."""

from __future__ import annotations

from collections.abc import Iterator

from .. import storage
from ..config import Fault, option, settings
from ..distributed.world import World
from ..evaluation.plots import require_matplotlib
from ..evaluation.report import Report, rendered
from ..evaluators.context import Context
from ..evaluators.settings import EvaluateInputs
from ..evaluators.table import EVALUATORS, choose_evaluators

_OPTIONAL = ", ".join(f"{name} (see {each.asked_by})" for name, each in EVALUATORS.items() if each.asked_by)


@settings
class EvaluateRun(EvaluateInputs):
    """All settings of ``evaluate.py``."""

    evaluators: tuple[str, ...] = option(
        (), f"evaluators, of {', '.join(EVALUATORS)}; none = all whose inputs are given, except {_OPTIONAL}"
    )

    def faults(self) -> Iterator[Fault]:
        found = list(super().faults())
        yield from found
        if not found:
            choose_evaluators(self.evaluators, self)


class Evaluation:
    """An evaluation in progress: its evaluators, their context, and the report so far."""

    def __init__(self, run: EvaluateRun, world: World):
        self.evaluators = choose_evaluators(run.evaluators, run)
        if any(evaluator.plots for evaluator in self.evaluators.values()):
            require_matplotlib()  # now, not after sampling
        self.context = Context(run, world)
        self.report_dir = run.evaluation.report_dir
        if world.is_main:
            storage.make_dirs(self.report_dir)  # now, not after sampling: it may not be writable
        self.report = Report()

    def run(self) -> str:
        """Run all evaluators. Returns their tables, to print."""
        found = Report.joined(evaluator.run(self.context) for evaluator in self.evaluators.values())
        self.report = Report(found.sections, {"step": self.context.pipeline.step, **found.scores})
        return rendered(found.summary, aligned=True)

    def write(self) -> str:
        """Write report.md, its images and scores.json. Returns the path of the report."""
        return self.report.write(self.report_dir, f"Evaluation after {self.context.pipeline.step:,} steps")
