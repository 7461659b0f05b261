"""The effect of guidance on the base: without, classifier-free, by the noised CLIP, both, and text-unconditional.

In the shapes world ShapeEval scores the samples; on other data the classifier does, by retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...evaluation.guidance_report import GuidanceSetting, Score, guidance_sections, guidance_settings, scores_to_dict
from ...shapes.prompts import ShapePrompt
from ...shapes.shape_eval import evaluate_shapes
from .captions import candidates, caption_recall, real_recall
from .context import Context
from .contract import BASE, CLASSIFIER, Evaluator, Findings

SCALES = (1.0, 4.0, 16.0)  # classifier scales when none are given
SHAPES_TEXT = (
    "Fraction of images of single objects in which the number, shape, color, size and position are all right, judged "
    "from the pixels alone (ShapeEval's *all attributes*). A text-unconditional generator does not read the caption: "
    "only the classifier steers it."
)


def settings(context: Context) -> list[GuidanceSetting]:
    """The guidance settings to compare."""
    scales = context.run.classifier.classifier_scale or SCALES
    return guidance_settings(context.guidance_scale, scales, context.base.tokenizer is not None)


def run(context: Context) -> Findings:
    if context.settings.shapes_dir:
        prompts = context.shape_prompts(("attributes",), context.settings.guidance_prompts)
        captions, text = [prompt.text for prompt in prompts], SHAPES_TEXT
        scores = {setting: _shape_score(context, prompts, setting) for setting in settings(context)}
    else:
        captions, text = context.captioned.captions, _retrieval_text(context)
        scores = {s: caption_recall(context, context.features(captions, s)) for s in settings(context)}
    images = {setting: context.sample(captions, setting)[0] for setting in scores}
    return Findings(guidance_sections(text, scores, images, captions), {"guidance": scores_to_dict(scores)})


def _shape_score(context: Context, prompts: Sequence[ShapePrompt], setting: GuidanceSetting) -> Score:
    images = context.sample([prompt.text for prompt in prompts], setting)[0]
    row = evaluate_shapes(images, prompts)["all attributes"]
    return Score(row.score, row.low, row.high, row.n)


def _retrieval_text(context: Context) -> str:
    ceiling = real_recall(context)
    return (
        f"Fraction of images whose caption the classifier retrieves among {candidates(context)}. Ceiling (real "
        f"images): {ceiling.value:.3f} ({ceiling.low:.3f} – {ceiling.high:.3f}). The classifier is biased toward "
        "images that it guided: compare only settings without it."
    )


GUIDANCE = Evaluator("guidance", (BASE, CLASSIFIER), run, plots=True)
