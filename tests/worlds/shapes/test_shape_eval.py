"""ShapeEval: prompts are balanced and held-out where they should be; each score falls exactly when it should."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from diff_dalle.config import InputError
from diff_dalle.worlds.shapes.parser import parse_shapes
from diff_dalle.worlds.shapes.prompts import TASKS, shape_prompts
from diff_dalle.worlds.shapes.render import render
from diff_dalle.worlds.shapes.scenes import COLORS, OPPOSITE, POSITIONS, SHAPES, SIZES, ShapesConfig
from diff_dalle.worlds.shapes.shape_eval import ROWS, evaluate_shapes, judge

CONFIG = ShapesConfig()
PROMPTS = shape_prompts(40)


def renders(prompts, change=lambda item: item) -> np.ndarray:
    """Renders of the prompts' scenes, each object changed."""
    scenes = [replace(p.scene, objects=tuple(change(item) for item in p.scene.objects)) for p in prompts]
    return np.stack([render(content) for content in scenes])


def of(task: str, n: int = 12) -> list:
    return shape_prompts(n, tasks=[task])


def cycled(table, value):
    names = list(table)
    return names[(names.index(value) + 1) % len(names)]


@pytest.fixture(scope="module")
def perfect():
    return evaluate_shapes(renders(PROMPTS), PROMPTS)


@pytest.mark.slow
def test_ceilings_are_high_and_renders_reach_them(perfect):
    """Real renders score 0.995 or more in every row, degraded ones 0.97 or more."""
    assert [row.name for row in perfect.rows] == [name for name, _, _ in ROWS]
    for row in perfect.rows:
        assert row.score == row.ceiling >= 0.995, row
        assert row.ceiling_degraded >= 0.97, row
        assert row.low <= row.score <= row.high and row.n == 40


@pytest.mark.slow
def test_chance_is_what_counting_says(perfect):
    """Under wrong captions each attribute is right as often as two balanced draws agree."""
    expected = {
        "color": 1 / 6, "shape": 1 / 4, "size": 1 / 2, "position": 1 / 5, "single object": 1 / 4,
        "all attributes": 1 / 200, "relation": 1 / 1000, "two objects": 1 / 6,
    }  # fmt: skip
    for name, chance in expected.items():
        assert abs(perfect[name].chance - chance) < 0.05, name


@pytest.mark.parametrize(
    "field, change",
    [
        ("color", lambda item: replace(item, color=cycled(COLORS, item.color))),
        ("shape", lambda item: replace(item, shape=cycled(SHAPES, item.shape))),
        ("size", lambda item: replace(item, size=cycled(SIZES, item.size))),
        ("position", lambda item: replace(item, x=0.25 if item.x > 0.4 else 0.75, y=0.5)),
    ],
)
def test_one_wrong_attribute_costs_its_own_row_and_all_attributes(field, change):
    """Changing one attribute in every image zeroes that row and the joint one, and no other."""
    prompts = of("attributes")
    report = evaluate_shapes(renders(prompts, change), prompts)
    for name in ("color", "shape", "size", "position"):
        assert report[name].score == (0.0 if name == field else 1.0), name
    assert report["all attributes"].score == 0.0


def test_swapped_colors_cost_binding_but_not_two_objects():
    """A red circle and a blue square drawn as a blue circle and a red square."""
    for task, score in (("binding", 0.0), ("two objects", 1.0)):
        prompts = of(task)
        images = []
        for prompt in prompts:
            a, b = prompt.scene.objects
            images.append(render(replace(prompt.scene, objects=(replace(a, color=b.color), replace(b, color=a.color)))))
        assert evaluate_shapes(np.stack(images), prompts)[task].score == score


def test_exchanged_places_cost_the_relation():
    """The same two objects, each where the other should be."""
    prompts = of("relation")
    images = []
    for prompt in prompts:
        a, b = prompt.scene.objects
        images.append(render(replace(prompt.scene, objects=(replace(a, x=b.x, y=b.y), replace(b, x=a.x, y=a.y)))))
    report = evaluate_shapes(np.stack(images), prompts)
    assert report["relation"].score == 0.0
    mirrored = [replace(p, scene=replace(p.scene, relation=OPPOSITE[p.scene.relation])) for p in prompts]
    parsed = parse_shapes(np.stack(images))
    assert all(judge(p, found)["correct"] for p, found in zip(mirrored, parsed, strict=True))


@pytest.mark.parametrize("task", ["single object", "counting"])
def test_a_surplus_object_is_wrong(task):
    """One more of the same object than asked for."""
    prompts, images = of(task), []
    for prompt in prompts:
        objects = prompt.scene.objects
        free = [xy for xy in POSITIONS.values() if all(max(abs(t.x - xy[0]), abs(t.y - xy[1])) > 0.43 for t in objects)]
        surplus = [replace(objects[0], x=x, y=y) for x, y in free[:1]]
        images.append(render(replace(prompt.scene, objects=(*objects, *surplus) if surplus else objects[1:])))
    assert evaluate_shapes(np.stack(images), prompts)[task].score == 0.0


def test_blank_images_score_nothing():
    """No object found, every score 0, and the report says so."""
    prompts = shape_prompts(4)
    report = evaluate_shapes(np.full((len(prompts), 32, 32, 3), 128, np.uint8), prompts)
    assert report.empty == 1.0 and all(row.score == row.chance == 0.0 for row in report.rows)


def test_the_report_can_be_kept_and_read(perfect):
    """to_dict survives JSON; the table has a row for each score."""
    kept = json.loads(json.dumps(perfect.to_dict()))
    assert kept["color"]["n"] == 40 and kept["empty"] == 0.0
    assert len(perfect.table().rows) == len(perfect.rows)


def test_numbers_of_images_and_prompts_must_agree():
    """An image too few, and a task with too few prompts for chance, are refused."""
    with pytest.raises(InputError, match="one image per prompt"):
        evaluate_shapes(renders(PROMPTS[:3]), PROMPTS[:4])
    with pytest.raises(InputError, match="at least 2"):
        evaluate_shapes(renders(PROMPTS[:1]), PROMPTS[:1])
    with pytest.raises(InputError, match="at least 2"):
        shape_prompts(1)
    with pytest.raises(InputError, match="did you mean binding"):
        shape_prompts(4, tasks=["bindings"])


def test_prompts_are_balanced_and_repeatable():
    """Each task has n prompts; color-shape pairs, sizes and positions differ in number by at most one."""
    assert shape_prompts(40) == PROMPTS and shape_prompts(40, seed=1) != PROMPTS
    assert Counter(p.task for p in PROMPTS) == dict.fromkeys(TASKS, 40)
    lone = [p.scene.objects[0] for p in PROMPTS if p.task == "attributes"]
    for counts in (
        Counter((t.color, t.shape) for t in lone),
        Counter(t.size for t in lone),
        Counter(t.position for t in lone),
    ):
        assert max(counts.values()) - min(counts.values()) <= 1
    assert len({(t.color, t.shape) for t in lone}) == 20


def test_held_out_pairs_are_asked_for_in_their_task_alone():
    """Prompts of that task ask for held-out pairs only, those of the others never."""
    for prompt in PROMPTS:
        held = {f"{t.color} {t.shape}" in CONFIG.held_out for t in prompt.scene.objects}
        assert held == {prompt.task == "held-out pairs"}


def test_the_held_out_phrasing_is_its_tasks_alone():
    """Its prompts begin like no other prompt."""
    assert {p.task for p in PROMPTS if p.text.startswith("the ")} == {"held-out phrasing"}
    assert all(p.text.startswith("the ") for p in PROMPTS if p.task == "held-out phrasing")


def test_prompts_never_change():
    """SHA-256 of their texts and of the renders of their scenes, of any seed: scores of different versions compare."""
    prompts = shape_prompts(8, seed=3)
    texts = hashlib.sha256("\n".join(prompt.text for prompt in prompts).encode())
    scenes = hashlib.sha256(b"".join(render(prompt.scene).tobytes() for prompt in prompts))
    assert texts.hexdigest() == "149f1ae453f17125b4523235c1dc90ca57c038a2aa5c4529cb95f81b695d8d8b"
    assert scenes.hexdigest() == "78e8456bfe30f832d546a5de53eede71dc3180767e879401af581063521cec00"


def test_tasks_a_world_cannot_pose_are_left_out():
    """Without held-out pairs and with one size: no such task, no size row."""
    config = ShapesConfig(held_out=(), sizes=("large",))
    prompts = shape_prompts(4, config=config)
    assert "held-out pairs" not in {p.task for p in prompts}
    assert "size" not in {row.name for row in evaluate_shapes(renders(prompts), prompts).rows}
