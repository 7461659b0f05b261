"""Scores of image variations: perfect ones, others' ones, and what the embedding does not carry."""

from dataclasses import replace

import numpy as np
import torch

from diff_dalle.shapes.image_variations import (
    ATTRIBUTES,
    TASKS,
    probe_scenes,
    probe_scores,
    variation_rows,
    variation_section,
    variation_table,
)
from diff_dalle.shapes.prompts import shape_prompts
from diff_dalle.shapes.render import render
from diff_dalle.shapes.scenes import ShapesConfig, scene
from diff_dalle.shapes.shape_eval import evaluate_shapes

CONFIG = ShapesConfig(train_samples=600)


def rendered(scenes) -> np.ndarray:
    return np.stack([render(each, 32) for each in scenes])


def embedded(scenes) -> torch.Tensor:
    """Everything but the size, one-hot."""
    words = [*CONFIG.colors, *CONFIG.shapes, *CONFIG.positions]
    rows = [(each.objects[0].color, each.objects[0].shape, each.objects[0].position) for each in scenes]
    return torch.tensor([[float(word in row) for word in words] for row in rows])


def test_probes_read_what_embeddings_carry_of_scenes_of_one_object():
    scenes, prompts = probe_scenes(CONFIG, 300), shape_prompts(40, 0, CONFIG, TASKS)
    assert len(scenes) == 300 and all(each.kind == "single" and len(each.objects) == 1 for each in scenes)
    singles = [each for each in map(lambda i: scene(CONFIG, i), range(600)) if each.kind == "single"]
    assert probe_scenes(CONFIG) == singles and scenes == singles[:300]
    queries = embedded([prompt.scene for prompt in prompts])
    queries[40:] = queries[40:].roll(1, 0)  # pairs of color and shape that a probe cannot have learned do not count
    found = probe_scores(embedded(scenes), scenes, queries, prompts)
    assert found["color"] == found["shape"] == found["position"] == 1.0 and found["size"] < 0.75


def test_rows_score_variations_against_their_own_pictures():
    prompts = shape_prompts(20, 0, CONFIG, TASKS)
    recolored = [
        replace(p.scene, objects=(replace(p.scene.objects[0], color="red"),), background="white") for p in prompts
    ]
    probes = dict.fromkeys(ATTRIBUTES, 1.0) | {"size": 0.5}
    rows = {row.name: row for row in variation_rows(evaluate_shapes(rendered(recolored), prompts), probes)}
    assert list(rows) == [*ATTRIBUTES, "all attributes", "held-out pairs"]
    assert rows["position"].score == rows["shape"].score == rows["size"].score == 1.0
    red = np.mean([prompt.scene.objects[0].color == "red" for prompt in prompts[:20]])
    assert rows["color"].score == red == rows["all attributes"].score and rows["held-out pairs"].score == 0
    assert rows["color"].probe == 1.0 and rows["all attributes"].probe is None
    table = variation_table(list(rows.values()))
    assert "| size | 1.00 |" in table and table.endswith("hardly carries size: look at the CLIP first.")
    carried = variation_table([replace(row, probe=row.probe and 1.0) for row in rows.values()])
    assert "hardly" not in carried


def test_the_grid_shows_pictures_above_their_variations():
    pictures = np.arange(12, dtype=np.uint8)[:, None, None, None] * np.ones((12, 8, 8, 3), np.uint8)
    rows = variation_rows(
        evaluate_shapes(
            rendered([p.scene for p in shape_prompts(2, 0, CONFIG, TASKS)]), shape_prompts(2, 0, CONFIG, TASKS)
        ),
        {},
    )
    small = variation_section(rows, pictures, pictures[:, :4, :4] + 100, pictures + 200)
    single = variation_section(rows, pictures, None, pictures + 200)
    assert small.image.width == single.image.width and small.image.height > single.image.height
    values = set(np.unique(np.asarray(small.image)))
    assert {0, 100, 200, 11 - 1, 110, 210} <= values and 211 not in values  # every sixth of five
    assert "variations of the first U-Net" in small.text and "first U-Net" not in single.text
