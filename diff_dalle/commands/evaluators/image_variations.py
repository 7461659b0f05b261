"""Variations of pictures of the shapes world by a decoder, from the embeddings of its CLIP."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from ...shapes.image_variations import (
    TASKS,
    probe_scenes,
    probe_scores,
    variation_rows,
    variation_section,
    variation_table,
)
from ...shapes.render import render
from ...shapes.shape_eval import evaluate_shapes
from .context import Context, rendered
from .contract import DECODER, SHAPES_WORLD, Evaluator, Findings


def run(context: Context) -> Findings:
    prompts = context.shape_prompts(TASKS)
    pictures = rendered(prompts, context.decoder.image_size)
    embeddings = context.embed(pictures)
    stages = context.vary(embeddings)
    scenes = probe_scenes(context.shapes)
    known = context.embed(np.stack([render(scene, context.decoder.image_size) for scene in scenes]))
    rows = variation_rows(evaluate_shapes(stages[-1], prompts), probe_scores(known, scenes, embeddings, prompts))
    section = variation_section(rows, pictures, stages[0] if len(stages) > 1 else None, stages[-1])
    return Findings([section], {"image_variations": {row.name: asdict(row) for row in rows}}, variation_table(rows))


IMAGE_VARIATIONS = Evaluator("image_variations", (DECODER, SHAPES_WORLD), run)
