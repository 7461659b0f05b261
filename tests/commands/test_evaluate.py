"""The report on a cascade: both sizes scored, up-samplers judged by real pictures, pictures changed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cascade_making import BLIND, make_stage

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.errors import InputError
from diff_dalle.shapes.editing import VARIATIONS, around, changes
from diff_dalle.shapes.render import render
from diff_dalle.shapes.scenes import ShapesConfig
from diff_dalle.shapes.shards import write_shapes

CONFIG = ShapesConfig(image_size=32, train_samples=8, val_samples=8, samples_per_shard=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A shapes world and generators that make 16 pixels, and 32 of 16, with and without text."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_shapes(CONFIG, str(folder / "world"))
    make_stage(
        folder / "base.pt", image_size=16, text_length=24, diffusion_steps=8, noise_schedule="cosine", sample_interval=0
    )
    make_stage(folder / "up.pt", image_size=32, text_length=24, small_size=16, low_res_skip=True)
    make_stage(folder / "blind.pt", image_size=32, small_size=16, **BLIND)
    return folder


def evaluation(folder, **flags):
    usual = {"shapes_dir": folder / "world", "report_dir": folder / "report", "prompts_per_task": 2}
    usual |= {"upsampler_paths": folder / "up.pt", "upsampler_timestep_respacing": 2, "upsampler_batch_size": 8}
    if "model_path" in flags:
        usual["timestep_respacing"] = 2
    flags = {**usual, **flags}
    argv = [str(part) for name, value in flags.items() for part in (f"--{name}", value) if value is not None]
    return Evaluation(parse(EvaluateRun, argv), World(SINGLE, torch.device("cpu")))


def test_a_cascade_is_scored_at_both_sizes_and_its_pictures_are_changed(folder):
    under_way = evaluation(folder, model_path=folder / "base.pt", edits=2)
    tables = under_way.judge()
    report = under_way.write()
    assert tables.count("all attributes") == 2 and "bicubic" in tables
    text = Path(report).read_text(encoding="utf-8")
    for name in ("grid", "grid_enlarged", "upsampling", "inpainting", "image_to_image", "variations"):
        assert (folder / "report" / f"{name}.png").exists() and f"({name}.png)" in text
    scores = json.loads((folder / "report" / "scores.json").read_text())
    assert {"scores", "scores enlarged", "upsampling", "editing"} <= scores.keys()
    assert scores["upsampling"]["n"] == 2 and scores["upsampling"]["ours"]["consistency"]["value"] > 0
    assert scores["editing"]["inpainting"]["kept"] is True
    assert set(scores["editing"]["variation"]) == {f"variation {v:g}" for v in VARIATIONS}


def test_up_samplers_alone_are_judged_by_real_pictures_with_and_without_text(folder):
    for name in ("up.pt", "blind.pt"):
        under_way = evaluation(folder, upsampler_paths=folder / name)
        assert "all attributes" not in under_way.judge() and "upsampling" in under_way.scores
    shards = evaluation(folder, shapes_dir=None, data_dir=folder / "world" / "val", num_samples=5)
    shards.judge()
    assert shards.scores["upsampling"]["n"] == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"edits": 2}, "edits is 2, .* base generator"),
        ({"edits": 1, "model_path": "base.pt"}, "edits is 1"),
        ({"upsampler_paths": None, "model_path": "base.pt"}, "settings of up-samplers are given, but none of these"),
        ({"classifier_path": "c.pt"}, "--classifier_path is given, but what it judges"),
        ({"data_dir": "x"}, "either --shapes_dir or --data_dir"),
    ],
)
def test_what_cannot_be_judged_is_refused(folder, flags, words):
    with pytest.raises(InputError, match=words):
        evaluation(folder, **flags)


def test_a_change_replaces_a_thing_by_another_of_its_size_and_place():
    found = changes(6, 0, CONFIG)
    assert len(found) == 6
    for change in found:
        before, after = change.before.scene.things[0], change.after.scene.things[0]
        assert (before.size, before.position) == (after.size, after.position)
        assert before.colour != after.colour and before.shape != after.shape
    scenes = [prompt.scene for change in found for prompt in (change.before, change.after)]
    assert len(set(scenes)) == len(scenes)


def test_the_mask_covers_the_thing():
    for change in changes(6, 1, CONFIG):
        scene = change.before.scene
        empty = render(scene.__class__(**{**vars(scene), "things": ()}), 32).astype(int)
        drawn = np.abs(render(scene, 32).astype(int) - empty).max(2) > 0
        mask = around(scene.things[0], 32)
        assert drawn.any() and not (drawn & ~mask).any() and mask.mean() < 0.6
