"""The table of evaluators, with what each needs. They run, and their sections appear in the report, in this order.

To add one: a function that takes the context, on all ranks, and returns its findings, and an entry of ``EVALUATORS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import Fault, InputError, lookup, named
from ..evaluation.plots import training_sections
from ..evaluation.report import Report
from .context import Context
from .control import control
from .copies import copies
from .editing import editing
from .emoji import emoji_world
from .feature_metrics import MIN_IMAGES, feature_metrics, upsampling
from .guidance import by_noise_level, guidance, real_images, similarity
from .image_variations import image_variations
from .settings import EvaluateInputs
from .shapes import latent_cascade, samples


@dataclass(frozen=True)
class Need:
    """An input of an evaluator. name: noun phrase for messages; flag: the setting that supplies it."""

    name: str
    flag: str
    met: Callable[[EvaluateInputs], object]


BASE = Need("a base generator", "--model_path", lambda run: run.evaluation.model_path and not run.cascade.stage_b)
DECODER = Need("a decoder", "--decoder_path", lambda run: run.evaluation.decoder_path)
SAMPLED = Need(
    "a base generator or a decoder", "--model_path or --decoder_path", lambda run: BASE.met(run) or DECODER.met(run)
)
CASCADE = Need("a latent cascade", "--stage_b and --model_path", lambda run: run.cascade.stage_b)
UPSAMPLERS = Need("upsamplers", "--upsampler_paths", lambda run: run.upsampler_paths)
FEATURES = Need(
    "a noised CLIP or another network",
    "--classifier_path or --feature_network",
    lambda run: run.classifier.classifier_path or run.evaluation.feature_network,
)
CLASSIFIER = Need("a noised CLIP", "--classifier_path", lambda run: run.classifier.classifier_path)
JUDGE = Need(
    "a noised CLIP",
    "--classifier_path or --judge_path",
    lambda run: run.evaluation.judge_path or run.classifier.classifier_path,
)
SHAPES_WORLD = Need("a shapes world", "--shapes_dir", lambda run: run.evaluation.shapes_dir)
EMOJI_WORLD = Need("an emoji world", "--emoji_dir", lambda run: run.evaluation.emoji_dir)
CAPTIONED_DATA = Need("captioned shards", "--data_dir", lambda run: run.evaluation.captioned)
TRAINING_DATA = Need("the shards of its training", "--training_dir", lambda run: run.evaluation.training_dir)
EDITS = Need("a number of images to edit", "--edits", lambda run: run.evaluation.edits)
CONTROLNET = Need("a ControlNet", "--controlnet", lambda run: run.evaluation.controlnet)
PROGRESS = Need("a training log", "--progress", lambda run: run.evaluation.progress)


@dataclass(frozen=True)
class Evaluator:
    """An entry of the table.

    plots:    whether it draws plots, which require matplotlib.
    asked_by: the setting that asks for it when --evaluators is empty; "" = it then runs whenever its needs are met.
    least:    number of captions of data_dir that it needs.
    """

    run: Callable[[Context], Report]
    needs: tuple[Need, ...]
    plots: bool = False
    asked_by: str = ""
    least: int = 2

    def missing(self, run: EvaluateInputs) -> list[Need]:
        return [need for need in self.needs if not need.met(run)]


def training_curves(context: Context) -> Report:
    """Held-out loss and caption-swap gap over training, from the run's progress.csv."""
    return Report(training_sections(context.settings.progress))


EVALUATORS: dict[str, Evaluator] = {
    "shapes": Evaluator(samples, (BASE, SHAPES_WORLD)),
    "emoji": Evaluator(emoji_world, (BASE, JUDGE, EMOJI_WORLD)),
    "captions": Evaluator(real_images, (BASE, CLASSIFIER, CAPTIONED_DATA)),
    "guidance": Evaluator(guidance, (BASE, CLASSIFIER), plots=True),
    "similarity": Evaluator(similarity, (BASE, CLASSIFIER, CAPTIONED_DATA)),
    "retrieval": Evaluator(by_noise_level, (BASE, CLASSIFIER), plots=True),
    "feature_metrics": Evaluator(feature_metrics, (SAMPLED, FEATURES), asked_by="metrics", least=MIN_IMAGES),
    "copies": Evaluator(copies, (BASE, CAPTIONED_DATA, TRAINING_DATA), asked_by="training_dir"),
    "upsampling": Evaluator(upsampling, (UPSAMPLERS,)),
    "editing": Evaluator(editing, (BASE, SHAPES_WORLD, EDITS)),
    "image_variations": Evaluator(image_variations, (DECODER, SHAPES_WORLD)),
    "control": Evaluator(control, (BASE, SHAPES_WORLD, CONTROLNET), asked_by="controlnet"),
    "latent_cascade": Evaluator(latent_cascade, (CASCADE, SHAPES_WORLD)),
    "training_curves": Evaluator(training_curves, (PROGRESS,), plots=True),
}


def choose_evaluators(names: Sequence[str], run: EvaluateInputs) -> dict[str, Evaluator]:
    """The evaluators with these names; without names, the default ones whose needs are met. In order of the table.

    Raises InputError for an unknown name and for one whose needs are not met.
    """
    chosen, possible = bool(names), [name for name, each in EVALUATORS.items() if not each.missing(run)]
    asked = [name for name, each in EVALUATORS.items() if each.asked_by and getattr(run.evaluation, each.asked_by)]
    if not names:
        names = [*(name for name in possible if not EVALUATORS[name].asked_by), *asked]
    if not names:
        asking = [EVALUATORS[name].asked_by for name in possible]  # those that can be asked for
        flags = " or ".join(map(named, asking or ["classifier_path", "shapes_dir"]))
        raise InputError(f"no evaluator applies to what is given, so the report would be empty: set {flags}")
    for name in set(asked) - set(names):
        rule = f"is for the evaluator {name}: add it to {named('evaluators')}"
        raise InputError(Fault(EVALUATORS[name].asked_by, rule))
    count = run.evaluation.num_samples
    for name in names:
        evaluator = lookup(EVALUATORS, name, "evaluator")
        if run.evaluation.captioned and count < evaluator.least:
            rule = f"the evaluator {name} needs at least {evaluator.least}"
            raise InputError(Fault("num_samples", rule, count))
        if missing := evaluator.missing(run):
            inputs = " and ".join(f"{need.name} ({need.flag})" for need in missing)
            remedy = f"remove {name} from --evaluators" if chosen else f"leave --{evaluator.asked_by} out"
            them = "them" if len(missing) > 1 else "it"
            raise InputError(f"the evaluator {name} needs {inputs}: set {them}, or {remedy}")
    return {name: evaluator for name, evaluator in EVALUATORS.items() if name in names}
