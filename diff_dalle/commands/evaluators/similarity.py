"""Noised-CLIP score of the samples of every guidance setting, and of real images."""

from __future__ import annotations

from ...evaluation.report import Section, markdown_table
from .context import Context
from .contract import BASE, CAPTIONED_DATA, CLASSIFIER, Evaluator, Findings
from .guidance import settings

TEXT = "Mean cosine similarity, from -1 to 1, of the classifier's image and text features."


def run(context: Context) -> Findings:
    data = context.captioned
    features = {setting.name: context.features(data.captions, setting) for setting in settings(context)}
    features["real images"] = context.real_features
    text = context.text_features
    scores = {}
    for name, image in features.items():
        own, other = ((image * caption).sum(1).mean().item() for caption in (text, text.roll(1, 0)))
        scores[name] = {"own caption": own, "another's caption": other}
    rows = [[name, *(f"{value:.3f}" for value in row.values())] for name, row in scores.items()]
    table = markdown_table(["guidance", "own caption", "another's caption"], rows)
    return Findings([Section("Noised-CLIP score", f"{TEXT}\n\n{table}")], {"similarity": scores})


SIMILARITY = Evaluator("similarity", (BASE, CLASSIFIER, CAPTIONED_DATA), run)
