"""Scores of image variations: perfect ones, others' ones, and what the embedding does not carry."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diff_dalle.config import InputError
from diff_dalle.evaluators import image_variations as module
from diff_dalle.evaluators.image_variations import (
    ATTRIBUTES,
    TASKS,
    image_variations,
    linear_probe,
    probe_scenes,
    probe_scores,
    variation_rows,
    variation_table,
)
from diff_dalle.images.grid import MARGIN, image_grid
from diff_dalle.worlds.shapes.prompts import shape_prompts
from diff_dalle.worlds.shapes.render import render
from diff_dalle.worlds.shapes.scenes import ShapesConfig, scene
from diff_dalle.worlds.shapes.shape_eval import evaluate_shapes

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
    rows = {row["name"]: row for row in variation_rows(evaluate_shapes(rendered(recolored), prompts), probes)}
    assert list(rows) == [*ATTRIBUTES, "all attributes", "held-out pairs"]
    scores = {name: row["score"] for name, row in rows.items()}
    assert scores["position"] == scores["shape"] == scores["size"] == 1.0
    red = np.mean([prompt.scene.objects[0].color == "red" for prompt in prompts[:20]])
    assert scores["color"] == red == scores["all attributes"] and scores["held-out pairs"] == 0
    assert rows["color"]["probe"] == 1.0 and rows["all attributes"]["probe"] is None
    table, note = variation_table(list(rows.values()))
    assert "| size | 1.00 |" in str(table) and note.endswith("hardly carries size: look at the CLIP first.")
    assert len(variation_table([{**row, "probe": row["probe"] and 1.0} for row in rows.values()])) == 1


@pytest.mark.parametrize("unets", [1, 2])
def test_the_grid_shows_pictures_above_their_variations(unets, monkeypatch):
    drawn, prompts = [], shape_prompts(12, 0, CONFIG, TASKS)
    pictures = np.arange(24, dtype=np.uint8)[:, None, None, None] * np.ones((24, 32, 32, 3), np.uint8)
    stages = [pictures[:, :16, :16] + 100, pictures + 200][-unets:]
    context = SimpleNamespace(shapes=CONFIG, shape_prompts=lambda tasks: prompts, vary=lambda embeddings: stages)
    context.pipeline, context.embed = SimpleNamespace(image_size=32), lambda images: torch.rand(len(images), 4)
    monkeypatch.setattr(
        module, "image_grid", lambda cells, columns: drawn.append((cells, columns)) or image_grid(cells, None, columns)
    )
    (section,) = image_variations(context).sections
    ((cells, columns),) = drawn
    chosen = np.linspace(0, 24, 10, endpoint=False).astype(int)
    rows = [rendered([prompts[i].scene for i in chosen]), *(pictures[chosen] + added for added in (100, 200)[-unets:])]
    assert np.array_equal(cells, np.concatenate(rows)) and columns == 10
    (figure,) = section.figures
    grid, step = np.asarray(figure.image), 96 + MARGIN  # images of 32 pixels are shown at 96
    assert grid.shape[0] == MARGIN + (unets + 1) * step
    for row, added in enumerate((100, 200)[-unets:], 1):
        corner = MARGIN + row * step + 48
        assert [grid[corner, MARGIN + k * step + 48, 0] - added for k in range(10)] == list(chosen)
    np.testing.assert_array_equal(
        grid[MARGIN : MARGIN + 96 : 3, MARGIN : MARGIN + 96 : 3], render(prompts[0].scene, 32)
    )
    assert ("variations of the first U-Net" in section.text) == (unets == 2)


# --------------------------------------------------------------------------------------------------- linear probes


def features(n: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Two classes that differ in the sign of one small feature among large ones, one of which is constant."""
    generator = torch.Generator().manual_seed(seed)
    values = 100 * torch.randn(n, 5, generator=generator)
    values[:, 1], values[:, 2] = 0.01 * values[:, 1].sign() * (1 + values[:, 1].abs() / 100), 7.0
    return values, ["high" if value > 0 else "low" for value in values[:, 1]]


def test_what_is_linear_is_read_whatever_its_scale():
    known, labels = features(400, 0)
    asked, truth = features(200, 1)
    found = linear_probe(known, labels, asked)
    assert sum(a == b for a, b in zip(found, truth, strict=True)) >= 196
    assert found == linear_probe(known, labels, asked)


def test_what_is_not_there_is_not_read():
    known, labels = features(400, 0)
    asked, truth = features(400, 1)
    known, asked = known[:, [0, 3, 4]], asked[:, [0, 3, 4]]
    found = linear_probe(known, labels, asked)
    assert 150 <= sum(a == b for a, b in zip(found, truth, strict=True)) <= 250


def test_it_is_the_minimum_of_the_penalized_cross_entropy():
    """Against plain gradient descent on the same loss."""
    torch.manual_seed(0)
    known, asked = torch.randn(60, 3, dtype=torch.float64), torch.randn(500, 3, dtype=torch.float64)
    labels = ["abc"[int(i)] for i in (known[:, 0] > 0.3).long() + (known[:, 1] > 0).long()]
    mean, std = known.mean(0), known.std(0, unbiased=False)
    x, targets = (known - mean) / std, torch.tensor(["abc".index(label) for label in labels])
    weight, bias = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(6_000):
        error = (torch.softmax(x @ weight + bias, 1) - torch.eye(3, dtype=torch.float64)[targets]) / len(x)
        weight, bias = weight - 0.5 * (x.T @ error + 2e-3 * weight), bias - 0.5 * error.sum(0)
    plain = ((asked - mean) / std @ weight + bias).argmax(1)
    found = linear_probe(known, labels, asked)
    assert sum("abc"[i] == label for i, label in zip(plain.tolist(), found, strict=True)) >= 498


def test_labels_must_be_as_many_as_features():
    for labels in ([], ["a"] * 3):
        with pytest.raises(InputError, match=f"a probe got {len(labels)} labels for 2 features"):
            linear_probe(torch.zeros(2, 4), labels, torch.zeros(1, 4))
