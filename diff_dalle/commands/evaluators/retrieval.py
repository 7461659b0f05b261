"""Retrieval by the classifier on real images, by noise level: where it is at chance, it cannot guide."""

from __future__ import annotations

from ...evaluation.report import Section
from ...evaluation.retrieval import CANDIDATES
from .context import Context, rendered
from .contract import BASE, CLASSIFIER, Evaluator, Findings

TEXT = (
    "How often the classifier matches real images and captions: recall at 1 and 5 (R@1, R@5). At the chance level, its "
    "gradient carries no information about the caption."
)


def run(context: Context) -> Findings:
    if context.settings.shapes_dir:
        prompts = context.shape_prompts(("attributes",), 4 * CANDIDATES)
        distinct = {prompt.text: prompt for prompt in prompts}  # else two captions could be true of one image
        captions, images = list(distinct), rendered(list(distinct.values()), context.base.image_size)
    else:
        captions, images = context.captioned.captions, context.captioned.images
    table = context.classifier.retrieval(images, captions)
    section = Section("Classifier accuracy by noise level", f"{TEXT}\n\n{table.text()}", table.plot(), "retrieval.png")
    return Findings([section], {"retrieval": {str(t): dict(row) for t, row in table.recall.items()}}, table.text())


RETRIEVAL = Evaluator("retrieval", (BASE, CLASSIFIER), run, plots=True)
