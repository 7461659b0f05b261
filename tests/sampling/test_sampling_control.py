"""Sampling steered by a ControlNet, of a generator and of stage C."""

import numpy as np
import pytest
import torch
from cascade_making import random_images
from checkpoint_making import FEW, make_file
from control_making import make_controlnet

import diff_dalle
from diff_dalle import Control, StageSettings
from diff_dalle.config import InputError
from diff_dalle.diffusion import GuidanceConfig
from diff_dalle.images.signal import PixelSignal

PROMPTS = ["a red circle", "", "two blue squares"]
PICTURES = list(random_images(3, 16, 16))


@pytest.fixture(scope="module")
def files(latent, tmp_path_factory):
    """Bases by name, with the arguments of ``load`` that belong to each, and pixels per side of its samples."""
    stage_c = latent.c, {"semantic": latent.semantic}
    return {"generator": (make_file(tmp_path_factory.mktemp("files")), {}), "stage_c": stage_c}


@pytest.fixture(scope="module")
def controlnets(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("controlnets")
    return {name: make_controlnet(path, folder / f"{name}.pt") for name, (path, _) in files.items()}


def load(files, name="generator", controlnet="", **options):
    path, rest = files[name]
    return diff_dalle.load(path, "cpu", "fp32", controlnet=controlnet, **{**rest, **options})


def sample(pipeline, control=None, prompts=PROMPTS, **options):
    options = {"sampler": FEW, "progress": False, **options}
    return pipeline.sample(prompts, control=control, **options).astype(int)


@pytest.fixture(scope="module")
def found(files, controlnets):
    """By base: the pipeline with its ControlNet, the base's own samples, and the steered ones."""
    pipelines = {name: load(files, name, controlnets[name]) for name in files}
    return {
        name: (each, sample(load(files, name)), sample(each, Control(PICTURES))) for name, each in pipelines.items()
    }


@pytest.fixture(scope="module")
def pipeline(found):
    return found["generator"][0]


BASES = pytest.mark.parametrize("name", ["generator", "stage_c"])


@BASES
def test_pictures_steer_the_samples(found, name):
    """Each its own: another picture gives another sample, without an effect on the others; scale 0 gives the base's
    own, exactly."""
    pipeline, base, steered = found[name]
    assert steered.shape == base.shape and all(not np.array_equal(a, b) for a, b in zip(steered, base, strict=True))
    other = sample(pipeline, Control([PICTURES[0], *random_images(2, 16, 16, seed=5)]))
    assert np.abs(other[0] - steered[0]).max() <= 1 and not np.array_equal(other[1], steered[1])
    assert np.array_equal(sample(pipeline, Control(PICTURES, scale=0.0)), base)
    weaker = sample(pipeline, Control(PICTURES, scale=0.3))
    assert np.abs(weaker - base).mean() < np.abs(steered - base).mean()


def test_pictures_are_used_in_turn(pipeline, found):
    images = sample(pipeline, Control(PICTURES[:2]), ["one"] * 3, seeds=[1] * 3)
    assert np.abs(images[2] - images[0]).max() <= 1 < np.abs(images[1] - images[0]).max()


@BASES
def test_the_interval_is_a_part_of_the_process(found, name):
    """An empty one gives the base's own samples."""
    pipeline, base, whole = found[name]
    images = [base, whole, *(sample(pipeline, Control(PICTURES, interval=i)) for i in ((0.5, 1.0), (0.0, 0.5)))]
    assert len({each.tobytes() for each in images}) == 4
    assert np.array_equal(sample(pipeline, Control(PICTURES, interval=(0.9999, 0.9999))), base)


@BASES
def test_guidance_passes_the_control_to_both_halves(found, name, monkeypatch):
    """The base sees the same residuals with and without a caption; the hint is made once for each half."""
    (pipeline, *_), seen, encoded = found[name], [], []
    steering = pipeline.stages[0].steering
    around = steering.around

    def watched(network, scale):
        steered = around(network, scale)
        inner, encode = steered.controlnet.forward, type(steered.controlnet).encode

        def forward(hint, x, t, cond):
            seen.append(hint)
            return inner(hint, x, t, cond)

        monkeypatch.setattr(steered.controlnet, "forward", forward)
        counted = lambda control: encoded.append(control) or encode(steered.controlnet, control)  # noqa: E731
        monkeypatch.setattr(steered.controlnet, "encode", counted)
        return steered

    monkeypatch.setattr(steering, "around", watched)
    sample(pipeline, Control(PICTURES), guidance=GuidanceConfig(guidance_scale=3.0, thresholding="none"))
    assert all(len(hint) == 2 * len(PICTURES) for hint in seen) and len(seen) >= 3
    assert all(torch.equal(*hint.chunk(2)) for hint in seen)
    assert len(encoded) == 2 and torch.equal(*encoded)


@BASES
def test_a_sample_does_not_depend_on_the_batch(files, tmp_path, name):
    """Random masks included, which follow from the seed."""
    controlnet = make_controlnet(files[name][0], tmp_path / "steer.pt", "inpaint", "{}")
    pipeline, control = load(files, name, controlnet), Control(PICTURES[:1])
    whole = sample(pipeline, control, ["a"] * 3, seed=4)
    assert np.abs(sample(pipeline, control, ["a"] * 3, seed=4, batch_size=2) - whole).max() <= 3
    assert np.abs(sample(pipeline, control, ["a"], seed=5) - whole[1]).max() <= 3


def test_given_masks_are_inpainted(files, tmp_path):
    controlnet = make_controlnet(files["generator"][0], tmp_path / "steer.pt", "inpaint", "{}")
    pipeline = load(files, "generator", controlnet)
    masks = [np.zeros((16, 16), dtype=bool), np.ones((16, 16), dtype=bool)]
    found = [sample(pipeline, Control(PICTURES[:1], [mask]), ["a"]) for mask in masks]
    assert not np.array_equal(*found)
    one = pipeline.stages[0].steering.controls(Control(PICTURES, [masks[1]]), [0, 2], (16, 16), PixelSignal(3), [0, 1])
    assert (one == 1).all()


def test_a_ready_made_control_is_taken_as_it_is(pipeline, found):
    """A picture of edges gives what the picture gives that these are the edges of."""
    steering, one = pipeline.stages[0].steering, found["generator"][2]
    edges = steering.controls(Control(PICTURES), range(3), (16, 16), PixelSignal(3), range(3))
    drawn = [(255 * each).permute(1, 2, 0).expand(-1, -1, 3).byte().numpy() for each in edges]
    assert 0 < edges.mean() < 1
    assert np.abs(one - sample(pipeline, Control(drawn, ready=True))).max() <= 1
    assert not np.array_equal(sample(pipeline, Control(PICTURES, ready=True)), one)


def test_pictures_of_another_size_are_scaled_and_cropped(pipeline):
    large = np.kron(PICTURES[0], np.ones((4, 4, 1), dtype=np.uint8))
    wide = np.concatenate([np.zeros((64, 16, 3), np.uint8), large, np.zeros((64, 16, 3), np.uint8)], 1)
    found = sample(pipeline, Control([PICTURES[0], large, wide]), ["a"] * 3, seeds=[1, 1, 1])
    assert np.abs(found - found[:1]).max() <= 1
    assert sample(pipeline, Control(PICTURES), size=(16, 24)).shape[1:3] == (16, 24)


def test_a_semantic_filter_uses_the_semantic_encoder(files, latent, tmp_path):
    path, _ = files["stage_c"]
    controlnet = make_controlnet(path, tmp_path / "steer.pt", "semantic_sr", "{}", channels=3)
    assert sample(load(files, "stage_c", controlnet), Control(PICTURES)).shape == (3, 48, 48, 3)
    with pytest.raises(InputError, match="semantic_sr, which requires a semantic encoder"):
        pipeline = diff_dalle.load(path, "cpu", "fp32", **latent.rest, controlnet=controlnet)
        sample(pipeline, Control(PICTURES))


def test_upsamplers_and_weights_that_are_not_kept(files, controlnets, found, tmp_path):
    """The ControlNet steers the base alone, and is loaded and freed with it."""
    upsampler = make_file(tmp_path, image_size=32, small_size=16, prediction="x_start")
    pipeline = load(files, "generator", controlnets["generator"], upsampler_paths=(upsampler,))
    few = StageSettings(FEW, GuidanceConfig(guidance_scale=1.0))
    images = sample(pipeline, Control(PICTURES), upsampling=few)
    assert images.shape == (3, 32, 32, 3)
    alone = sample(load(files, "generator", upsampler_paths=(upsampler,)), upsampling=few)
    assert not np.array_equal(images, alone)
    assert pipeline.stages[0].steering._network is None
    assert found["generator"][0].stages[0].steering._network is not None


def test_half_precision(files, controlnets, found):
    half = diff_dalle.load(files["generator"][0], "cpu", "bf16", controlnet=controlnets["generator"])
    assert np.abs(sample(half, Control(PICTURES)) - found["generator"][2]).mean() < 12


# ----------------------------------------------------------------------------------------------------------- bad input


def test_another_base_is_refused_unless_accepted(files, controlnets, tmp_path):
    other = make_file(tmp_path, dropout=0.1)
    message = r"is a ControlNet for the weights \w{16}, but those of .* are \w{16}: give the base of its training, or"
    path = str(tmp_path / "changed.pt")
    content = torch.load(files["generator"][0], weights_only=True)
    content["state"] = {name: value + 0.01 for name, value in content["state"].items()}
    torch.save(content, path)
    with pytest.raises(InputError, match=message):
        diff_dalle.load(path, "cpu", controlnet=controlnets["generator"])
    sample(
        diff_dalle.load(path, "cpu", controlnet=controlnets["generator"], accept_changed_base=True), Control(PICTURES)
    )
    with pytest.raises(InputError, match="is a ControlNet for a generator with other settings than .*: dropout"):
        diff_dalle.load(other, "cpu", controlnet=controlnets["generator"], accept_changed_base=True)


def test_a_base_in_half_precision_has_the_identity_of_what_is_loaded(files, tmp_path):
    """As training records it: of the network's own types, which the file's are not."""
    content = torch.load(files["generator"][0], weights_only=True)
    content["state"] = {name: value.half() for name, value in content["state"].items()}
    path = str(tmp_path / "half.pt")
    torch.save(content, path)
    controlnet = make_controlnet(path, tmp_path / "steer.pt")
    assert sample(diff_dalle.load(path, "cpu", "fp32", controlnet=controlnet), Control(PICTURES)).shape[0] == 3
    with pytest.raises(InputError, match="is a ControlNet for the weights"):
        load(files, "generator", controlnet)


def test_every_ready_made_control_is_checked_before_sampling(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline.stages[0], "sample_batches", None)  # which is not reached
    control = Control([PICTURES[0], *random_images(1, 24, 24)], ready=True)
    with pytest.raises(InputError, match="has 24 × 24 pixels, but must have the size of the sample, 16 × 16"):
        sample(pipeline, control, ["a"], batch_size=1)


def test_what_does_not_fit_is_refused(files, controlnets, pipeline, tmp_path):
    base, controlnet = files["generator"][0], controlnets["generator"]
    upsampler = (make_file(tmp_path, image_size=32, small_size=16, prediction="x_start"),)
    for path, options, message in (
        (base, {"controlnet": controlnets["stage_c"]}, "is a ControlNet for a stage_c, but .* holds a generator"),
        (base, {"controlnet": base}, "holds a generator, but a controlnet or a stage_c_controlnet is required"),
        (controlnet, {}, "holds a controlnet, but a generator"),
        ("", {"upsampler_paths": upsampler, "controlnet": controlnet}, "there is no base generator to steer"),
    ):
        with pytest.raises(InputError, match=message):
            diff_dalle.load(path, "cpu", **options)
    with pytest.raises(InputError, match="there is a ControlNet, but no picture to control by"):
        sample(pipeline)
    with pytest.raises(InputError, match="control is given, but there is no ControlNet"):
        sample(load(files), Control(PICTURES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": []}, "there is no picture to control by"),
        ({"images": [np.zeros((4, 4), np.uint8)]}, r"a picture to control by is uint8 of shape \[4, 4\]"),
        ({"interval": (0.5, 0.1)}, "control_interval is"),
        ({"interval": (0.5,)}, "control_interval is"),
        ({"interval": (-0.1, 1.0)}, "control_interval is"),
        ({"scale": float("nan")}, "control_scale is nan"),
        ({"masks": [np.ones((16, 16), bool)]}, "the ControlNet's filter canny has none: leave it out"),
        ({"masks": [np.ones((16, 16), bool)] * 2}, "there are 2 masks"),
        ({"masks": [np.ones((8, 8), bool)]}, "control_mask has 8 × 8 pixels, but must have the size of its image"),
        ({"masks": [np.ones((16, 16), bool)], "ready": True}, "leave one out"),
        (
            {"images": [np.zeros((16, 24, 3), np.uint8)], "ready": True},
            "has 24 × 16 pixels, but must have the size of the sample, 16 × 16",
        ),
    ],
)
def test_impossible_controls_are_refused(pipeline, options, message):
    with pytest.raises(InputError, match=message):
        sample(pipeline, Control(**{"images": PICTURES, **options}))
