"""Evaluation: runs evaluators on a generator, with or without a classifier and upsamplers, and writes a report."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .. import storage
from ..config import option
from ..distributed.world import World
from ..evaluation.plots import require_matplotlib
from ..evaluation.report import Section, write_report
from .evaluators.context import Context
from .evaluators.settings import EvaluateInputs
from .evaluators.table import EVALUATORS, choose_evaluators

_OPTIONAL = ", ".join(f"{name} (see {each.asked_by})" for name, each in EVALUATORS.items() if each.asked_by)


@dataclass(frozen=True)
class EvaluateRun(EvaluateInputs):
    """All settings of ``evaluate.py``."""

    evaluators: tuple[str, ...] = option(
        (), f"evaluators, of {', '.join(EVALUATORS)}; none = all whose inputs are given, except {_OPTIONAL}"
    )

    def __post_init__(self):
        super().__post_init__()
        choose_evaluators(self.evaluators, self)


class Evaluation:
    """An evaluation in progress: its evaluators, their context, and the report so far."""

    def __init__(self, run: EvaluateRun, world: World):
        self.evaluators = choose_evaluators(run.evaluators, run)
        if any(evaluator.plots for evaluator in self.evaluators):
            require_matplotlib()  # now, not after sampling
        self.context = Context(run, world)
        self.report_dir = run.evaluation.report_dir
        if world.is_main:
            storage.make_dirs(self.report_dir)  # now, not after sampling: it may not be writable
        self.sections: list[Section] = []
        self.scores: dict = {"step": self.context.pipeline.step}

    def run(self) -> str:
        """Run all evaluators. Returns their tables, to print."""
        tables = []
        for evaluator in self.evaluators:
            findings = evaluator.run(self.context)
            self.sections += findings.sections
            self.scores |= findings.scores
            tables += [findings.table] if findings.table else []
        return "\n\n".join(tables)

    def write(self) -> str:
        """Write report.md, its images and scores.json. Returns the path of the report."""
        path = storage.join(self.report_dir, "report.md")
        write_report(path, f"Evaluation after {self.context.pipeline.step:,} steps", self.sections)
        scores = json.dumps(self.scores, indent=1).encode()
        storage.write_bytes(storage.join(self.report_dir, "scores.json"), scores)
        return path
