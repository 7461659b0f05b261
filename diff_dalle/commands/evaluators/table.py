"""The table of evaluators. They run, and their sections appear in the report, in this order."""

from __future__ import annotations

from collections.abc import Sequence

from ...config import lookup
from ...errors import InputError
from .captions import CAPTIONS
from .contract import Evaluator
from .control import CONTROL
from .editing import EDITING
from .emoji import EMOJI
from .feature_metrics import FEATURE_METRICS
from .guidance import GUIDANCE
from .image_variations import IMAGE_VARIATIONS
from .latent_cascade import LATENT_CASCADE
from .retrieval import RETRIEVAL
from .settings import EvaluateInputs
from .shapes import SHAPES
from .similarity import SIMILARITY
from .training_curves import TRAINING_CURVES
from .upsampling import UPSAMPLING

EVALUATORS: dict[str, Evaluator] = {
    evaluator.name: evaluator
    for evaluator in (
        SHAPES,
        EMOJI,
        CAPTIONS,
        GUIDANCE,
        SIMILARITY,
        RETRIEVAL,
        FEATURE_METRICS,
        UPSAMPLING,
        EDITING,
        IMAGE_VARIATIONS,
        CONTROL,
        LATENT_CASCADE,
        TRAINING_CURVES,
    )
}


def choose_evaluators(names: Sequence[str], run: EvaluateInputs) -> list[Evaluator]:
    """The evaluators with these names; without names, the default ones whose needs are met. In order of the table.

    Raises InputError for an unknown name and for one whose needs are not met.
    """
    chosen = bool(names)
    asked = [name for name, evaluator in EVALUATORS.items() if evaluator.is_asked(run)]
    if not names:
        free = [name for name, each in EVALUATORS.items() if not each.asked_by and not each.missing(run)]
        names = [*free, *asked]
    if not names:
        possible = [f"--{each.asked_by}" for each in EVALUATORS.values() if each.asked_by and not each.missing(run)]
        flags = " or ".join(possible or ["--classifier_path", "--shapes_dir"])
        raise InputError(f"no evaluator applies to what is given, so the report would be empty: set {flags}")
    for name in set(asked) - set(names):
        raise InputError(f"{EVALUATORS[name].asked_by} is for the evaluator {name}: add it to --evaluators")
    samples = run.evaluation.num_samples
    for name in names:
        evaluator = lookup(EVALUATORS, name, "evaluator")
        if run.evaluation.captioned and samples < evaluator.least:
            raise InputError(f"num_samples is {samples}, but the evaluator {name} needs at least {evaluator.least}")
        if missing := evaluator.missing(run):
            inputs = " and ".join(f"{need.name} ({need.flag})" for need in missing)
            otherwise = f"remove {name} from --evaluators" if chosen else f"leave --{evaluator.asked_by} out"
            them = "them" if len(missing) > 1 else "it"
            raise InputError(f"the evaluator {name} needs {inputs}: set {them}, or {otherwise}")
    return [evaluator for evaluator in EVALUATORS.values() if evaluator.name in names]
