"""The HTTP API: what it answers equals what the library samples, and what it refuses."""

import base64
import dataclasses
import json
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_making import samples_in
from PIL import Image
from web_making import Gate, call, client_of, equipped, make_service, needs_web, pixels

import diff_dalle
from diff_dalle.commands.serve import Limits
from diff_dalle.config import InputError
from diff_dalle.images.output import png_bytes
from diff_dalle.web.api import create_app
from diff_dalle.web.door import BodyLimit
from diff_dalle.web.pictures import Pictures
from diff_dalle.web.repeat import shown_path
from diff_dalle.web.wish import BATCH, Wish, work_of

pytestmark = needs_web

LIMITS = Limits(max_size=64, max_steps=20, max_images=3, max_prompt=40, max_queue=2, max_body=1, max_pixels=1)
SCRIPTS = Path(__file__).parents[2] / "scripts"
PICTURE = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
MASK = np.zeros((20, 24, 3), dtype=np.uint8)
MASK[4:14, 6:16] = 255


def text(picture):
    return base64.b64encode(png_bytes(Image.fromarray(picture))).decode()


@pytest.fixture(scope="module")
def service(files):
    made = equipped(files, LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(service):
    return client_of(service)


def ask(client, **wish):
    return client.post("/api/sample", json={"prompt": "a star", "steps": 2, **wish})


def test_models_are_listed_without_their_paths(client, files):
    answer = client.get("/api/models")
    one, cascade = answer.json()["models"]
    assert (one["name"], one["size"], one["stages"], one["classifier"], one["controlnet"]) == ("one", 16, 1, True, True)
    assert (one["lora"], cascade["lora"]) == (["red", "soft"], [])
    assert (cascade["name"], cascade["size"], cascade["stages"], cascade["classifier"]) == ("cascade", 16, 2, False)
    assert str(Path(files["base"]).parent) not in answer.text


def test_a_png_is_what_the_library_samples(client, files):
    answer = ask(client, seed=5, sampler="ddim", guidance_scale=2.0)
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
    pipeline = diff_dalle.load(files["base"], "cpu", "fp32")
    sampler = pipeline.stages[0].defaults.sampler.changed(sampler="ddim", steps=2)
    guidance = diff_dalle.GuidanceConfig(guidance_scale=2.0)
    expected = pipeline.sample("a star", seed=5, sampler=sampler, guidance=guidance, progress=False)[0]
    assert np.array_equal(pixels(answer.content), expected)


EDIT = {"init_image": text(PICTURE), "mask": text(MASK)}
WISHES = {
    "plain": {"num_images": 2, "seed": 3, "negative_prompt": "a red circle", "sampler": "heun"}
    | {"prompt": "-x|'y' $(z)", "width": 24, "height": 16},
    "guided and adapted": {"classifier_scale": 2.0, "guidance_scale": 1.0, "lora": ["red:0.5", "soft"], "seed": 2},
    "controlled": {"control_image": text(PICTURE), "control_scale": 0.5, "lora": ["soft:-1"]},
    "controlled and inpainted": EDIT | {"control_image": text(PICTURE)},
    "image to image": {"init_image": text(PICTURE), "strength": 0.6, "eta": 0.5, "sampler": "ddim"}
    | {"guidance_scale": 4.0, "guidance_interval": [0.2, 0.9], "thresholding": "none"}
    | {"guidance_rescale": 0.7, "spacing": "trailing"},
    "variation": {"init_image": text(PICTURE), "variation": 0.4},
    "cascade": {"model": "cascade", "num_images": 2, "width": 24, "height": 24, "guidance_scale": 2.0},
    "cascade settings": {"model": "cascade", "upsampler_sampler": ["ddim"], "upsampler_timestep_respacing": ["3"]}
    | {"upsampler_thresholding": ["none"], "noise_level": [0.2], "upsampler_seed": [9], "stages": True},
}


@pytest.mark.parametrize("name", WISHES)
def test_the_command_line_and_the_python_code_repeat_the_images(name, client, files, tmp_path, monkeypatch, capsys):
    """In a folder with the files that they name, pictures as they were sent among them."""
    wish = WISHES[name]
    answer = ask(client, format="json", **wish)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    images = [pixels(base64.b64decode(image)) for image in found["images"]]
    assert len(images) == wish.get("num_images", 1) == len(found["seeds"])
    pictures = found.get("pictures", {})
    assert set(pictures) == set(wish) & {"init_image", "mask", "control_image"}
    for key in pictures:
        (tmp_path / f"{key}.png").write_bytes(base64.b64decode(wish[key]))
    named = ("base", "classifier", "controlnet", "low", "middle")
    for path in (*(files[each] for each in named), *files["loras"]):
        (tmp_path / Path(path).name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "again.py").write_text(found["python"])
    space = runpy.run_path(str(tmp_path / "again.py"))
    assert np.array_equal(space["images"], images)

    before, _, command = found["command"].rpartition(" && ")
    if before:
        (tmp_path / "prompt.txt").write_text(shlex.split(before)[2])
    words = shlex.split(command)
    assert words[:2] == ["diff-dalle", "sample"]
    monkeypatch.setattr(sys, "argv", [*words[1:], "--device", "cpu", "--precision", "fp32", "--logdir", str(tmp_path)])
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runpy.run_path(str(SCRIPTS / "sample.py"), run_name="__main__")
    assert np.array_equal(samples_in(tmp_path), images)


def test_the_stages_of_a_cascade_and_its_last_images(client):
    found = ask(client, format="json", **WISHES["cascade settings"]).json()
    sizes = [pixels(base64.b64decode(stage[0])).shape for stage in found["stages"]]
    assert sizes == [(8, 8, 3), (16, 16, 3)] and found["stages"][-1] == found["images"]


@pytest.mark.parametrize(
    "wish",
    [WISHES["plain"], WISHES["controlled"], EDIT | {"model": "cascade"}],
    ids=["plain", "controlled", "inpainted"],
)
def test_a_wish_of_an_answer_gives_the_same_images(wish, client):
    first = ask(client, format="json", **wish).json()
    again = client.post("/api/sample", json={**first["wish"], **first.get("pictures", {}), "format": "json"}).json()
    assert again["images"] == first["images"] and again["wish"] == first["wish"]


def test_answers_do_not_tell_where_files_are(client, files, monkeypatch):
    """Only what is below the working directory keeps its folders, so that the command works from there."""
    folder = Path(files["base"]).parent
    for name in ("guided and adapted", "controlled", "cascade settings"):
        assert str(folder) not in ask(client, format="json", **WISHES[name]).text
    monkeypatch.chdir(folder.parent)
    assert f"--model_path={folder.name}/ema.pt" in ask(client, format="json").json()["command"]
    assert [shown_path(path) for path in ("shapes", "s3://bucket/runs/ema.pt", "/a/runs/")] == [
        "shapes",
        "ema.pt",
        "runs",
    ]


def test_known_pixels_stay_and_controls_and_loras_have_an_effect(client):
    new, kept = (
        pixels(ask(client, init_image=EDIT["init_image"], **how, width=24, height=16).content)
        for how in ({"strength": 0.6}, {"mask": EDIT["mask"]})
    )
    outside = MASK[2:18, :, 0] == 0
    assert np.array_equal(kept[outside], PICTURE[2:18][outside]) and not np.array_equal(new[outside], kept[outside])
    control, other = {"control_image": text(PICTURE)}, {"control_scale": 0.5}
    wishes = ({}, control, control | other, control | {"lora": ["red"]}, {"lora": ["red"]}, {"lora": ["red:2"]}, {})
    images = [ask(client, **wish).content for wish in wishes]
    assert len(set(images)) == 6 and images[0] == images[-1]


def test_one_adapted_pipeline_is_kept(client, service):
    for lora in ("red", "soft", "red:0.5"):
        assert ask(client, lora=[lora]).status_code == 200
        assert len(service.models._adapted) == 1


def test_a_sentence_names_models_instead_of_their_files(service, files):
    said = service.models.without_paths(f"{files['base']}, {files['middle']} and {files['controlnet']} do not fit")
    assert said == "one (ema), cascade (middle) and one (edges) do not fit"


def test_guidance_is_that_of_the_checkpoint():
    made = make_service("emoji")
    made.worker.close()
    assert made.models.find("emoji").about()["guidance_scale"] == 1.5


BAD = [
    ({"steps": 21}, 400, "steps is 21, but must be a number of steps, at most 20"),
    ({"steps": 0}, 400, "steps is 0"),
    ({"num_images": 4, "format": "json"}, 400, "num_images is 4"),
    ({"num_images": 2}, 400, "a png holds one image"),
    ({"prompt": "x" * 41}, 400, "prompt has 41 characters, but may have at most 40"),
    ({"negative_prompt": "x" * 41}, 400, "negative_prompt has 41"),
    ({"width": 72, "height": 16}, 400, "width is 72, but must be at most 64"),
    ({"width": 64, "height": 64, "num_images": 2, "format": "json"}, 400, "at most 1 for images of 64×64"),
    ({"steps": None}, 400, "the model one takes 30 steps of its own accord, but may take at most 20: set steps"),
    ({"init_image": text(np.zeros((2, 900, 3), np.uint8))}, 400, "init_image cannot be used: too narrow"),
    ({"width": 16}, 400, "width and height belong together"),
    ({"width": 17, "height": 16}, 400, "17"),
    ({"seed": -1}, 400, "seed is -1"),
    ({"seed": 1.5}, 400, "seed is 1.5"),
    ({"sampler": "eulerr"}, 400, "sampler is 'eulerr'"),
    ({"guidance_scale": 1e9}, 400, "guidance_scale is 1e+09"),
    ({"guidance_scale": float("nan")}, 400, "guidance_scale"),
    ({"guidance_rescale": 2}, 400, "guidance_rescale is 2, but must be at least 0 and at most 1"),
    ({"guidance_interval": [0.9, 0.2]}, 400, "guidance_interval is 0.9,0.2, but must be LOW,HIGH"),
    ({"perturbed_attention_scale": 1e9}, 400, "perturbed_attention_scale is 1e+09, but must be at least -100"),
    ({"noise_level": [0.1]}, 400, "upsampler settings are given, but no upsampler"),
    ({"stage_b_seed": 1}, 400, "settings of stage B are given, but there is none"),
    ({"model": "cascade", "upsampler_seed": [1, 2]}, 400, "upsampler_seed has 2 values for 1 upsampler"),
    ({"model": "cascade", "upsampler_eta": [0.5], "upsampler_sampler": ["heun"]}, 400, "upsampler_eta is 0.5, but"),
    ({"model": "cascade", "upsampler_timestep_respacing": ["9,9,9"]}, 400, "must be a number of steps, at most 20"),
    ({"model": "cascade", "upsampler_timestep_respacing": [""]}, 400, "must be a number of steps, at most 20"),
    ({"shift": 2.0}, 400, "shift is 2, but only stages B and C of a latent cascade have it"),
    ({"model": "cascade", "classifier_scale": 1.0}, 400, "cascade has no classifier"),
    ({"model": "../../etc/passwd"}, 404, "there is no model '../../etc/passwd'"),
    ({"lora": ["red", "red"] * 9}, 400, "lora has 18 values, but the model one has 2 LoRAs"),
    ({"lora": ["/etc/passwd:1"]}, 400, "the LoRAs of the model one are: red, soft"),
    ({"lora": ["red:nan"]}, 400, "but the factor must be a finite number"),
    ({"lora": ["red:101"]}, 400, "but its factor must be a number of at most 100"),
    ({"label": 3}, 400, "the model one has 0 classes"),
    ({"strength": 0.5}, 400, "there is none: give it"),
    ({"init_image": "/etc/passwd"}, 400, "init_image must be a png, jpeg or webp file as a base64 text"),
    ({"init_image": {"path": "x"}}, 400, "init_image must be"),
    ({"init_image": base64.b64encode(b"GIF89a...").decode()}, 400, "init_image cannot be used: not a jpeg"),
    ({"init_image": text(np.zeros((1001, 1000, 3), np.uint8))}, 400, "too many pixels"),
    (
        {"init_image": text(PICTURE), "mask": text(MASK[:10])},
        400,
        "mask has 24 × 10 pixels, but must have those of init_image, 24 × 20",
    ),
    ({"model": "cascade", "control_image": text(PICTURE)}, 400, "cascade has no ControlNet"),
    ({"promt": "x"}, 400, "did you mean prompt"),
    ({"format": "gif"}, 400, "format must be one of png, json"),
    ({"stages": 1}, 400, "stages true or false"),
]


@pytest.mark.parametrize(("wish", "status", "words"), BAD)
def test_a_refusal_is_one_sentence(wish, status, words, client, files):
    answer = client.post(
        "/api/sample",
        content=json.dumps({"prompt": "a star", "steps": 2, **wish}),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == status and words in answer.json()["error"], answer.text
    assert "\n" not in answer.json()["error"] and str(Path(files["base"]).parent) not in answer.text


@pytest.mark.parametrize(
    ("body", "kind", "status", "words"),
    [
        (b"{", "application/json", 400, "not a JSON text"),
        (b"[" * 4000, "application/json", 400, "not a JSON text"),
        (b"[" * 100_000, "application/json", 413, "more than 4096 values"),
        (b"\xff", "application/json", 400, "not a JSON text"),
        (b"[]", "application/json", 400, "a JSON object"),
        (b'{"prompt": "x"}', "text/plain", 415, "Content-Type"),
        (b" " * ((1 << 20) + 1), "application/json", 413, "more than 1 MiB"),
    ],
)
def test_bodies_that_are_refused(body, kind, status, words, client):
    answer = client.post("/api/sample", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status and words in answer.json()["error"], answer.text


def test_a_body_without_a_length_is_cut_at_the_limit(client):
    parts = (b" " * (1 << 17) for _ in range(9))
    answer = client.post("/api/sample", content=parts, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_full_queue_answers_busy_and_recovers(client, service):
    gates = [Gate() for _ in range(3)]
    service.worker.submit(gates[0])
    assert gates[0].started.wait(10)
    jobs = [service.worker.submit(gate) for gate in gates[1:]]
    answer = ask(client)
    assert answer.status_code == 503 and "busy, try again" in answer.json()["error"]
    assert answer.headers["retry-after"] == "1"
    for gate in gates:
        gate.open.set()
    assert jobs[-1].wait(10) and ask(client).status_code == 200


def test_limits_of_a_request_follow_the_size_of_the_model():
    limits = Limits()
    assert [limits.largest_side(size) for size in (32, 64, 512)] == [128, 256, 1024]
    assert [limits.request_pixels(size) for size in (32, 1024)] == [128 * 128, 16 * 1024 * 1024]
    assert Limits(max_images=64).request_pixels(32) == 64 * 32 * 32
    with pytest.raises(InputError, match="max_scale is 0"):
        Limits(max_scale=0)


@pytest.mark.parametrize(("model", "side", "most"), [("one", 16, BATCH), ("cascade", 24, 1), ("one", 32, 1)])
def test_images_are_sampled_a_few_at_a_time(model, side, most, service):
    """So that a job that is stopped, or takes too long, ends soon, whatever was asked for."""
    asked, count = [], min(9, 16 * 16 * 16 // side**2)
    wish = Wish(model, "a star", num_images=count, steps=1, width=side, height=side)
    result = work_of(wish, Pictures(), service.models, Limits(max_images=9))(asked.append)
    assert max(len(each.index) for each in asked) == most and result.images.shape == (count, side, side, 3)
    assert len({tuple(each.index) for each in asked}) == -(-count // most)


def test_the_description_of_every_part_of_a_wish_is_plain(client):
    found = ask(client, format="json").json()["wish"]
    assert set(found) == {field.name for field in dataclasses.fields(Wish)}


def test_a_body_that_does_not_come_in_time_is_refused(service):
    part = {"type": "http.request", "body": b"{", "more_body": True}
    status, answer = call(BodyLimit(create_app(service), 100, 0.05), part)
    assert (status, answer) == (408, {"error": "the body must come within 0.05 s"})


def test_a_client_that_goes_away_ends_its_job(service, monkeypatch):
    gate, jobs = Gate(), []
    submit = service.worker.submit
    monkeypatch.setattr(service.worker, "submit", lambda work, place: jobs.append(submit(gate, place)) or jobs[0])
    body = {"type": "http.request", "body": b'{"prompt": "a star", "steps": 2}', "more_body": False}
    status, answer = call(create_app(service), body, {"type": "http.disconnect"})
    assert (status, answer) == (499, {"error": "the client went away"})
    assert jobs[0].wait(5) and jobs[0].snapshot().refusal.args == ("canceled",)
