"""What the page does, without a browser: its events, sent as a browser sends them."""

import base64
import json

import numpy as np
import pytest
from page_client import Visitor, send
from web_making import Gate, equipped, needs_web, pixels

from diff_dalle.commands.serve import Limits
from diff_dalle.web.pictures import png

pytestmark = needs_web
PICTURE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
MAGENTA = np.array([255, 0, 255, 255])
EDITOR, PAST = "Picture to edit", "History: choose an image for its settings"
SHOWN, CONTROL, FILES = (
    "Images (gallery)",
    "Picture for the ControlNet",
    "Pictures that these read, and the JSON with them",
)
JSON = "HTTP API (POST /api/sample)"


@pytest.fixture(scope="module")
def service(files):
    made = equipped(files, Limits(max_steps=20))
    yield made
    made.close()


@pytest.fixture
def visitor(address):
    return Visitor(address)


def images(visitor, label=SHOWN):
    return [visitor.download(each["image"]) for each in visitor.values[label]]


def give(visitor, drawn=None):
    """Give the editor the picture, and what is drawn over it."""
    layers = [] if drawn is None else [visitor.upload(png(np.where(drawn[:, :, None], MAGENTA, 0).astype(np.uint8)))]
    visitor.values[EDITOR] = {"background": visitor.upload(png(PICTURE)), "layers": layers, "composite": None}


def test_an_image_grows_and_is_what_the_library_samples(visitor, service, monkeypatch):
    monkeypatch.setattr("diff_dalle.web.page.PREVIEW_SECONDS", 0.0)
    assert not visitor.shown[SHOWN] and not visitor.shown[PAST]
    answers = visitor.sample(Prompt="a star", Steps=20, Seed=5)
    assert visitor.shown[SHOWN] and visitor.shown[PAST]
    shown = [each[SHOWN]["value"] for each in answers if "value" in each[SHOWN]]
    assert len({json.dumps(each) for each in shown}) >= 3  # and the last
    (image,) = images(visitor)
    pipeline = service.models.pipeline("one")
    defaults = pipeline.stages[0].defaults
    sampler = defaults.sampler.changed(steps=20)
    assert np.array_equal(image, pipeline.sample("a star", seed=5, sampler=sampler, progress=False)[0])


def test_all_images_of_a_request_are_shown_while_they_grow(visitor, service, monkeypatch):
    """Also those of earlier batches, and the last answer has them all."""
    monkeypatch.setattr("diff_dalle.web.page.PREVIEW_SECONDS", 0.0)
    monkeypatch.setattr("diff_dalle.web.wish.BATCH", 2)
    answers = visitor.sample(Prompt="a star", Steps=10, Images=3)
    counts = [len(each[SHOWN]["value"]) for each in answers if "value" in each[SHOWN]]
    assert counts == sorted(counts) and {2, 3} == set(counts) and len(visitor.values[PAST]) == 3
    said = " ".join(str(each) for answer in answers for each in answer.values())
    assert "Sampling images 1 to 2 of 3: step" in said and "Sampling image 3 of 3: step" in said


def test_the_model_is_switched(visitor):
    """Its controls appear, others vanish, and its own steps and guidance are set, within the limits."""
    assert visitor.values["Steps"] == 20  # not its own 30, which are too many
    assert (
        visitor.shown["LoRAs"]
        and visitor.shown["Control by a picture"]
        and visitor.shown["Classifier guidance (0 = off)"]
    )
    visitor.values["Model"] = "cascade"
    visitor.fire("Model", "input")
    assert visitor.shown["Upsamplers"] and not visitor.shown["Stage B"] and not visitor.shown["Shift"]
    hidden = ("LoRAs", "Strength of the LoRAs", "Control by a picture", "Classifier guidance (0 = off)")
    assert not any(visitor.shown[label] for label in (*hidden, "Images of the earlier stages"))
    visitor.sample(Prompt="a star", Steps=2, Guidance_scale=1.0)
    assert visitor.shown["Images of the earlier stages"]
    assert images(visitor)[0].shape == (16, 16, 3) and images(visitor, "Images of the earlier stages")[0].shape[0] == 8
    assert json.loads(visitor.values[JSON])["model"] == "cascade"


def test_the_examples_are_those_of_the_model(visitor, service):
    """A click puts one into the prompt."""
    assert not visitor.shown["Examples"]
    service.models.served["cascade"].examples = ["a star", "a red circle"]
    visitor.values["Model"] = "cascade"
    visitor.fire("Model", "input")
    assert visitor.shown["Examples"]
    visitor.values["Examples"] = 1
    visitor.fire("Examples", "click")
    assert visitor.values["Prompt"] == "a red circle"
    service.models.served["cascade"].examples = []


def test_every_control_has_an_effect(visitor):
    visitor.sample(Prompt="a star", Steps=2)
    found = [images(visitor)[0].tobytes()]
    changes = (
        {"Negative_prompt": "a red circle"},
        {"LoRAs": ["red"]},
        {"Strength_of_the_LoRAs": 0.5},
        {"Classifier_guidance": 3.0},
        {"Picture_for": visitor.upload(png(PICTURE))},
        {"Strength_of_the_control": 0.3},
        {"Thresholding": "none"},
        {"Guidance_interval": "0,0.5"},
    )
    for change in changes:
        visitor.sample(**change)
        found.append(images(visitor)[0].tobytes())
    assert len(set(found)) == len(found)


def test_the_history_gives_settings_and_pictures_back(visitor, address):
    """What is chosen samples the same image, from the page and from the JSON; pictures of others do not stay."""
    drawn = np.zeros((40, 40), dtype=bool)
    drawn[10:30, 5:20] = True
    give(visitor, drawn)
    visitor.sample(Prompt="a star", Steps=3, Seed=4, Edit="Inpaint what is drawn", LoRAs=["red"])
    (inpainted,) = images(visitor)
    give(visitor)
    visitor.values[CONTROL] = visitor.upload(png(PICTURE[::-1]))
    visitor.sample(Edit="Image to image", Strength_of_image=0.4, LoRAs=[], Strength_of_the_control=0.5)
    (changed,) = images(visitor)
    visitor.values |= {EDITOR: None, CONTROL: None}
    visitor.sample(Prompt="a circle")
    (plain,) = images(visitor)
    for index, image, edit in ((2, inpainted, "Inpaint"), (1, changed, "Image to"), (0, plain, ""), (2, inpainted, "")):
        visitor.fire(PAST, "select", {"index": index, "value": visitor.values[PAST][index], "selected": True})
        assert visitor.values["Edit"].startswith(edit)
        assert (visitor.values[EDITOR] is None, visitor.values[CONTROL] is None) == (
            image is plain,
            image is not changed,
        )
        status, answer = send(f"{address}/api/sample", visitor.values[JSON].encode(), Content_Type="application/json")
        assert status == 200 and np.array_equal(pixels(answer), image)
    visitor.sample()
    assert np.array_equal(images(visitor)[0], inpainted)


def test_the_pictures_of_a_command_are_offered(visitor):
    drawn = np.eye(40, dtype=bool)
    give(visitor, drawn)
    visitor.sample(Prompt="a star", Steps=2, Edit="Inpaint what is drawn", Images=2)
    names = [each["orig_name"] for each in visitor.values[FILES]]
    assert visitor.shown[FILES] and names == ["init_image.png", "mask.png", "request.json"]
    assert "--init_image=init_image.png --mask=mask.png" in visitor.values["Command line"]
    picture, mask = (visitor.download(each) for each in visitor.values[FILES][:2])
    assert picture.shape == mask.shape == (16, 16, 3) and set(np.unique(mask)) == {0, 255}
    text = json.loads(send(visitor.values[FILES][2]["url"])[1])
    assert np.array_equal(pixels(base64.b64decode(text["mask"])), mask)
    status, answer = send(f"{visitor.address}/api/sample", json.dumps(text).encode(), Content_Type="application/json")
    sampled = [pixels(base64.b64decode(each)) for each in json.loads(answer)["images"]]
    assert status == 200 and np.array_equal(sampled, images(visitor))
    visitor.values[EDITOR] = None
    visitor.sample(Images=1)
    assert not visitor.shown[FILES]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"Steps": None}, "Steps is empty: enter a number"),
        ({"Images": None}, "Images is empty: enter a number"),
        ({"Images": 1.5}, "Images is 1.5: enter a whole number"),
        ({"Seed": None}, "Seed is empty: enter a number"),
        ({"Guidance_scale": None}, "Guidance scale (1 = off) is empty: enter a number"),
        ({"Guidance_scale": "x"}, "Guidance scale (1 = off) is &#x27;x&#x27;: enter a number"),
        ({"Classifier_guidance": None}, "Classifier guidance (0 = off) is empty: enter a number"),
        ({"LoRAs": ["red"], "Strength_of_the_LoRAs": None}, "Strength of the LoRAs is empty: enter a number"),
        ({"Steps": 21}, "Steps is 21, but must be a number of steps, at most 20"),
        ({"Sampler": "eulerr"}, "Sampler is &#x27;eulerr&#x27;"),
        ({"Model": "three"}, "There is no model &#x27;three&#x27;"),
        ({"Model": ["one"]}, "There is no model"),
        ({"LoRAs": ["/etc/passwd"]}, "the LoRAs of the model one are: red, soft"),
        ({"Edit": "Inpaint what is drawn"}, "Draw over the part of the picture"),
        ({"Edit": "Erase"}, "Edit must be one of Inpaint what is drawn"),
    ],
)
def test_what_cannot_be_sampled_is_told_in_a_sentence(visitor, values, sentence):
    visitor.values[visitor.label("Prompt")] = "a star"
    if "Edit" in values:
        give(visitor)
    answer = visitor.sample(**{"Steps": 2, **values})[-1]
    assert sentence in json.dumps(answer)


def test_pictures_of_the_page_are_not_decoded_for_a_full_queue(visitor, service, monkeypatch):
    gate = Gate()
    jobs = [service.worker.submit(gate)]
    assert gate.started.wait(10)
    give(visitor)
    jobs += [service.worker.submit(print) for _ in range(service.limits.max_queue)]
    monkeypatch.setattr("diff_dalle.web.pictures.decode", None)
    answer = visitor.sample(Prompt="a star", Steps=2, Edit="Image to image")[-1]
    assert f"Busy, try again: {service.limits.max_queue} requests" in json.dumps(answer)
    for job in jobs:
        job.cancel()


def test_a_choice_that_is_not_in_the_history_is_told(visitor):
    with pytest.raises(AssertionError, match="no longer in the history"):
        visitor.fire(PAST, "select", {"index": 3, "value": None})
