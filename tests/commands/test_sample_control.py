"""The flags of ``sample.py`` for ControlNets."""

import numpy as np
import pytest
from cascade_making import random_images
from checkpoint_making import make_file, samples_in
from control_making import make_controlnet
from PIL import Image
from script_running import run

import diff_dalle
from diff_dalle import Control
from diff_dalle.commands.sample import PromptConfig
from diff_dalle.commands.sample_inputs import read_request
from diff_dalle.config import InputError
from diff_dalle.diffusion.editing import EditConfig
from diff_dalle.diffusion.sampling import SamplerConfig
from diff_dalle.sampling.control import SteeringConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, ControlNets for it, two pictures and a mask."""
    folder = tmp_path_factory.mktemp("control")
    base = make_file(folder)
    make_controlnet(base, folder / "canny.pt")
    make_controlnet(base, folder / "inpaint.pt", "inpaint", "{}")
    (folder / "pictures").mkdir()
    for i, picture in enumerate(random_images(2, 16, 16)):
        Image.fromarray(picture).save(folder / "pictures" / f"{i}.png")
    Image.fromarray(np.full((16, 16), 255, np.uint8)).save(folder / "mask.png")
    return folder


def sample(folder, logdir, *flags):
    common = f"--model_path {folder}/ema.pt --logdir {logdir} --steps 4 --device cpu --precision fp32"
    run("sample.py", common, *flags)
    return samples_in(logdir).astype(int)


def test_flags_are_what_the_library_does(folder, tmp_path):
    """One sample for each picture of a folder; strength and interval have an effect."""
    control = f"--controlnet {folder}/canny.pt --control_image {folder}/pictures"
    found = sample(folder, tmp_path / "a", control)
    pipeline = diff_dalle.load(str(folder / "ema.pt"), "cpu", "fp32", controlnet=str(folder / "canny.pt"))
    options = {"sampler": SamplerConfig(steps=4), "progress": False}
    expected = pipeline.sample(control=Control(list(random_images(2, 16, 16))), **options)
    assert found.shape == (2, 16, 16, 3) and np.abs(found - expected).max() <= 1
    for i, flag in enumerate(("--control_scale 0.5", "--control_interval 0.5,1", "--control_ready")):
        assert not np.array_equal(sample(folder, tmp_path / str(i), control, flag), found)


def test_a_mask(folder, tmp_path):
    control = f"--controlnet {folder}/inpaint.pt --control_image {folder}/pictures/0.png"
    one = sample(folder, tmp_path / "a", control, f"--control_mask {folder}/mask.png --whole_mask True")
    assert one.shape == (1, 16, 16, 3) and not np.array_equal(one, sample(folder, tmp_path / "b", control))


def test_a_file_may_say_it_all(folder, tmp_path):
    control = f"--controlnet {folder}/canny.pt --control_image {folder}/pictures"
    config = tmp_path / "pipeline.yaml"
    config.write_text(
        f"controlnet: {folder}/canny.pt\ncontrol_image: [{folder}/pictures]\ncontrol_scale: 0.5\n", encoding="utf-8"
    )
    one = sample(folder, tmp_path / "a", "--config", config)
    other = sample(folder, tmp_path / "b", control, "--control_scale 0.5")
    assert np.array_equal(one, other)


def test_a_file_is_a_picture_whatever_its_name_is(folder, tmp_path):
    picture, text = tmp_path / "upload", tmp_path / "notes.txt"
    picture.write_bytes((folder / "pictures" / "0.png").read_bytes())
    text.write_text("no picture")

    def read(config=None, **steering):
        steered = SteeringConfig(controlnet="c.pt", **steering)
        return read_request(config or PromptConfig(("ema.pt",)), EditConfig(), steered)

    found = read(control_image=(str(picture),)).control.images[0]
    assert np.array_equal(found, read(control_image=(str(folder / "pictures" / "0.png"),)).control.images[0])
    with pytest.raises(
        InputError, match=r"^--control_image .*notes\.txt cannot be used: not a picture of a known format$"
    ):
        read(control_image=(str(text),)).control.images[0]
    with pytest.raises(
        InputError, match=r"^--control_mask .*notes\.txt cannot be used: not a picture of a known format$"
    ):
        read(control_image=(str(picture),), control_mask=(str(text),))
    for name in ("missing", "missing.png"):
        with pytest.raises(InputError, match=f"^--control_image .*{name} does not exist"):
            read(control_image=(str(tmp_path / name),)).control.images[0]
    for name, model in (("images", ("ema.pt",)), ("init_image", ("ema.pt",)), ("reconstruct", ())):
        with pytest.raises(InputError, match=f"^--{name} .*notes.txt cannot be used"):
            request = read(PromptConfig(model, **{name: (str(text),)}), control_image=(str(picture),))
            (request.reconstruct or request.images.images)[0]
