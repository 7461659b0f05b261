"""ShapeEval: prompts are balanced and held-out where they should be; each score falls exactly when it should."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from diff_dalle.errors import InputError
from diff_dalle.shapes.parser import parse_shapes
from diff_dalle.shapes.prompts import TASKS, shape_prompts
from diff_dalle.shapes.render import render
from diff_dalle.shapes.scenes import COLOURS, OPPOSITE, POSITIONS, SHAPES, SIZES, ShapesConfig
from diff_dalle.shapes.shape_eval import ROWS, evaluate_shapes, judge

CONFIG = ShapesConfig()
PROMPTS = shape_prompts(40)


def pictures(prompts, change=lambda thing: thing) -> np.ndarray:
    """Renders of the prompts' scenes, each thing changed."""
    scenes = [replace(p.scene, things=tuple(change(thing) for thing in p.scene.things)) for p in prompts]
    return np.stack([render(content) for content in scenes])


def of(task: str, n: int = 40) -> list:
    return shape_prompts(n, tasks=[task])


def cycled(table, value):
    names = list(table)
    return names[(names.index(value) + 1) % len(names)]


@pytest.fixture(scope="module")
def perfect():
    return evaluate_shapes(pictures(PROMPTS), PROMPTS)


def test_ceilings_are_high_and_renders_reach_them(perfect):
    """Real renders score 0.995 or more in every row, degraded ones 0.97 or more."""
    assert [row.name for row in perfect.rows] == [name for name, _, _ in ROWS]
    for row in perfect.rows:
        assert row.score == row.ceiling >= 0.995, row
        assert row.ceiling_degraded >= 0.97, row
        assert row.low <= row.score <= row.high and row.n == 40


def test_chance_is_what_counting_says(perfect):
    """Under wrong captions each attribute is right as often as two balanced draws agree."""
    expected = {
        "colour": 1 / 6, "shape": 1 / 4, "size": 1 / 2, "position": 1 / 5, "single object": 1 / 4,
        "all attributes": 1 / 200, "relation": 1 / 1000, "two objects": 1 / 6,
    }  # fmt: skip
    for name, chance in expected.items():
        assert abs(perfect[name].chance - chance) < 0.05, name


@pytest.mark.parametrize(
    "field, change",
    [
        ("colour", lambda thing: replace(thing, colour=cycled(COLOURS, thing.colour))),
        ("shape", lambda thing: replace(thing, shape=cycled(SHAPES, thing.shape))),
        ("size", lambda thing: replace(thing, size=cycled(SIZES, thing.size))),
        ("position", lambda thing: replace(thing, x=0.25 if thing.x > 0.4 else 0.75, y=0.5)),
    ],
)
def test_one_wrong_attribute_costs_its_own_row_and_all_attributes(field, change):
    """Changing one attribute in every picture zeroes that row and the joint one, and no other."""
    prompts = of("attributes")
    report = evaluate_shapes(pictures(prompts, change), prompts)
    for name in ("colour", "shape", "size", "position"):
        assert report[name].score == (0.0 if name == field else 1.0), name
    assert report["all attributes"].score == 0.0


def test_swapped_colours_cost_binding_but_not_two_objects():
    """A red circle and a blue square drawn as a blue circle and a red square."""
    for task, score in (("binding", 0.0), ("two objects", 1.0)):
        prompts = of(task)
        images = []
        for prompt in prompts:
            a, b = prompt.scene.things
            images.append(
                render(replace(prompt.scene, things=(replace(a, colour=b.colour), replace(b, colour=a.colour))))
            )
        assert evaluate_shapes(np.stack(images), prompts)[task].score == score


def test_exchanged_places_cost_the_relation():
    """The same two things, each where the other should be."""
    prompts = of("relation")
    images = []
    for prompt in prompts:
        a, b = prompt.scene.things
        images.append(render(replace(prompt.scene, things=(replace(a, x=b.x, y=b.y), replace(b, x=a.x, y=a.y)))))
    report = evaluate_shapes(np.stack(images), prompts)
    assert report["relation"].score == 0.0
    mirrored = [replace(p, scene=replace(p.scene, relation=OPPOSITE[p.scene.relation])) for p in prompts]
    parsed = parse_shapes(np.stack(images))
    assert all(judge(p, found)["correct"] for p, found in zip(mirrored, parsed, strict=True))


@pytest.mark.parametrize("task", ["single object", "counting"])
def test_a_surplus_thing_is_wrong(task):
    """One more of the same thing than asked for."""
    prompts, images = of(task, 20), []
    for prompt in prompts:
        things = prompt.scene.things
        free = [xy for xy in POSITIONS.values() if all(max(abs(t.x - xy[0]), abs(t.y - xy[1])) > 0.43 for t in things)]
        surplus = [replace(things[0], x=x, y=y) for x, y in free[:1]]
        images.append(render(replace(prompt.scene, things=(*things, *surplus) if surplus else things[1:])))
    assert evaluate_shapes(np.stack(images), prompts)[task].score == 0.0


def test_blank_pictures_score_nothing():
    """No thing found, every score 0, and the report says so."""
    prompts = shape_prompts(4)
    report = evaluate_shapes(np.full((len(prompts), 32, 32, 3), 128, np.uint8), prompts)
    assert report.empty == 1.0 and all(row.score == row.chance == 0.0 for row in report.rows)


def test_the_report_can_be_kept_and_read(perfect):
    """to_dict survives JSON; the table has one line a row below its two header lines."""
    kept = json.loads(json.dumps(perfect.to_dict()))
    assert kept["colour"]["n"] == 40 and kept["empty"] == 0.0
    assert len(perfect.table().splitlines()) == 2 + len(perfect.rows)


def test_numbers_of_pictures_and_prompts_must_agree():
    """A picture too few, and a task with too few prompts for chance, are refused."""
    with pytest.raises(InputError, match="one for each"):
        evaluate_shapes(pictures(PROMPTS[:3]), PROMPTS[:4])
    with pytest.raises(InputError, match="at least 2"):
        evaluate_shapes(pictures(PROMPTS[:1]), PROMPTS[:1])
    with pytest.raises(InputError, match="at least 2"):
        shape_prompts(1)
    with pytest.raises(InputError, match="did you mean binding"):
        shape_prompts(4, tasks=["bindings"])


def test_prompts_are_balanced_and_repeatable():
    """Each task has n prompts; colour-shape pairs, sizes and positions differ in number by at most one."""
    assert shape_prompts(40) == PROMPTS and shape_prompts(40, seed=1) != PROMPTS
    assert Counter(p.task for p in PROMPTS) == dict.fromkeys(TASKS, 40)
    lone = [p.scene.things[0] for p in PROMPTS if p.task == "attributes"]
    for counts in (
        Counter((t.colour, t.shape) for t in lone),
        Counter(t.size for t in lone),
        Counter(t.position for t in lone),
    ):
        assert max(counts.values()) - min(counts.values()) <= 1
    assert len({(t.colour, t.shape) for t in lone}) == 20


def test_held_out_pairs_are_asked_for_in_their_task_alone():
    """Prompts of that task ask for held-out pairs only, those of the others never."""
    for prompt in PROMPTS:
        held = {f"{t.colour} {t.shape}" in CONFIG.held_out for t in prompt.scene.things}
        assert held == {prompt.task == "held-out pairs"}


def test_the_held_out_phrasing_is_its_tasks_alone():
    """Its prompts begin like no other prompt."""
    assert {p.task for p in PROMPTS if p.text.startswith("the ")} == {"held-out phrasing"}
    assert all(p.text.startswith("the ") for p in PROMPTS if p.task == "held-out phrasing")


def test_tasks_a_world_cannot_pose_are_left_out():
    """Without held-out pairs and with one size: no such task, no size row."""
    config = ShapesConfig(held_out=(), sizes=("large",))
    prompts = shape_prompts(4, config=config)
    assert "held-out pairs" not in {p.task for p in prompts}
    assert "size" not in {row.name for row in evaluate_shapes(pictures(prompts), prompts).rows}
