"""The contract of evaluators: what one needs, and what it returns.

To add an evaluator: a file in this folder with an ``Evaluator``, and a line in ``table.EVALUATORS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...evaluation.report import Section
from .context import Context
from .settings import EvaluateInputs


@dataclass(frozen=True)
class Need:
    """An input of an evaluator. name: noun phrase for messages; flag: the setting that supplies it."""

    name: str
    flag: str
    met: Callable[[EvaluateInputs], bool]


BASE = Need("a base generator", "--model_path", lambda run: bool(run.evaluation.model_path) and not run.cascade.stage_b)
DECODER = Need("a decoder", "--decoder_path", lambda run: bool(run.evaluation.decoder_path))
CASCADE = Need("a latent cascade", "--stage_b and --model_path", lambda run: bool(run.cascade.stage_b))
UPSAMPLERS = Need("upsamplers", "--upsampler_paths", lambda run: bool(run.upsampler_paths))
FEATURES = Need(
    "a noised CLIP or another network",
    "--classifier_path or --feature_network",
    lambda run: bool(run.classifier.classifier_path or run.evaluation.feature_network),
)
CLASSIFIER = Need("a noised CLIP", "--classifier_path", lambda run: bool(run.classifier.classifier_path))
SHAPES_WORLD = Need("a shapes world", "--shapes_dir", lambda run: bool(run.evaluation.shapes_dir))
EMOJI_WORLD = Need("an emoji world", "--emoji_dir", lambda run: bool(run.evaluation.emoji_dir))
CAPTIONED_DATA = Need("captioned shards", "--data_dir", lambda run: bool(run.evaluation.captioned))
EDITS = Need("a number of images to edit", "--edits", lambda run: bool(run.evaluation.edits))
CONTROLNET = Need("a ControlNet", "--controlnet", lambda run: bool(run.evaluation.controlnet))
PROGRESS = Need("a training log", "--progress", lambda run: bool(run.evaluation.progress))


@dataclass(frozen=True)
class Findings:
    """sections: of the report; scores: entries of scores.json; table: Markdown, also printed to the console."""

    sections: Sequence[Section] = ()
    scores: dict = field(default_factory=dict)
    table: str = ""


@dataclass(frozen=True)
class Evaluator:
    """An entry of the table.

    run:      samples with the context (all ranks call it) and returns its findings.
    plots:    whether it draws plots, which require matplotlib.
    asked_by: the setting that asks for it when --evaluators is empty; "" = it then runs whenever its needs are met.
    least:    number of captions of data_dir that it needs.
    """

    name: str
    needs: tuple[Need, ...]
    run: Callable[[Context], Findings]
    plots: bool = False
    asked_by: str = ""
    least: int = 2

    def is_asked(self, run: EvaluateInputs) -> bool:
        """Whether its own setting asks for it."""
        return bool(self.asked_by and getattr(run.evaluation, self.asked_by))

    def missing(self, run: EvaluateInputs) -> list[Need]:
        return [need for need in self.needs if not need.met(run)]
