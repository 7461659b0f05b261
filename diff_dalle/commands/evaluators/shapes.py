"""ShapeEval of the base's samples, and of the upsampled ones."""

from __future__ import annotations

from ...evaluation.report import Section
from ...shapes.report import sample_section, score_section
from ...shapes.shape_eval import evaluate_shapes
from .context import Context
from .contract import BASE, SHAPES_WORLD, Evaluator, Findings


def run(context: Context) -> Findings:
    prompts = context.shape_prompts()
    stages = context.sample([prompt.text for prompt in prompts], context.default_guidance, all_stages=True)
    sections: list[Section] = []
    scores, tables = {}, []
    for key, images in {"scores": stages[0], "scores upsampled": stages[-1]}.items():
        which = "" if key == "scores" else "upsampled"
        if which and len(stages) == 1:
            break
        report = evaluate_shapes(images, prompts)
        scores[key] = report.to_dict()
        sections += [sample_section(images, prompts, which), score_section(report, which)]
        tables.append(report.table())
    return Findings(sections, scores, "\n\n".join(tables))


SHAPES = Evaluator("shapes", (BASE, SHAPES_WORLD), run)
