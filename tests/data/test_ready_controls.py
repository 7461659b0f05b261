"""Ready-made controls beside the images of shards: the same crop and flip as the image's."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from refusing import refused
from shard_making import Letters, assert_shared, encoded, load, make_tar, random_image

from diff_dalle.data.buckets import AspectConfig
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import CaptionSpec, ControlSpec, ImageSpec, SampleSpec
from diff_dalle.images.preprocessing import TransformConfig

SPEC = SampleSpec(ImageSpec((16, 16)), control=ControlSpec("Cond.png"))


def shards(folder, controls=None):
    """Images whose control is the image upside down in brightness; controls: others, by number."""
    files = []
    for i in range(8):
        image = random_image(20, 24, i)
        control = Image.fromarray(255 - np.asarray(image))
        files.append((f"{i:03d}.png", encoded(image, "PNG")))
        files.append((f"{i:03d}.cond.png", (controls or {}).get(i, encoded(control, "PNG"))))
        files.append((f"{i:03d}.txt", b"a picture"))
    make_tar(folder / "0.tar", files)
    return folder


def control_of(folder, spec=SPEC, **settings):
    return load(folder, spec, **settings).batch_at(range(16)).cond.control


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"random_crop": True, "random_flip": True},
        {"aspect": AspectConfig(("1/1", "3/2"), bucket_factor=4)},
        {"transforms": (TransformConfig("RandomResizedCrop", (16,)), TransformConfig("RandomHorizontalFlip"))},
    ],
)
def test_the_control_shows_the_same_part_as_the_image(tmp_path, settings):
    batch = load(shards(tmp_path), SPEC, **settings).batch_at(range(1 if "aspect" in settings else 16))
    control = batch.cond.control
    assert control.shape == batch.images.shape and control.dtype == torch.float32
    assert control.min() >= 0 and control.max() <= 1
    assert ((1 - control) - (batch.images + 1) / 2).abs().max() < 0.02


def test_a_control_of_another_aspect_ratio_is_a_broken_sample(tmp_path, caplog):
    """Each is 20 × 24 like its image, a multiple or fraction of it to rounding, or of another shape."""
    sizes = {1: (40, 48), 2: (10, 12), 3: (27, 32), 4: (24, 20), 5: (24, 24), 6: (20, 36)}
    controls = {i: encoded(random_image(*size), "PNG") for i, size in sizes.items()}
    data = load(shards(tmp_path, controls), SPEC, max_broken=0.5)
    batch = data.batch_at(range(8))
    assert data.broken == 3 and batch.cond.control.shape == (8, 3, 16, 16)
    assert "0.tar : 004: its control has another aspect ratio, 20 × 24, than the image, 24 × 20" in caplog.text
    assert all(f"0.tar : 00{i}: its control" in caplog.text for i in (4, 5, 6))
    turned = Image.Exif()
    turned[0x0112] = 6
    upright = encoded(random_image(24, 20), "PNG", exif=turned)  # 20 × 24 as it is shown
    again = tmp_path / "turned"
    again.mkdir()
    assert load(shards(again, {4: upright}), SPEC).batch_at(range(8)) and "turned" not in caplog.text


def test_a_gray_control_has_one_channel(tmp_path):
    sources = shards(tmp_path)
    gray, colors = (control_of(sources, replace(SPEC, control=ControlSpec("cond.png", n))) for n in (1, 3))
    assert gray.shape == (16, 1, 16, 16)
    luma = (colors * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    assert (gray - luma).abs().max() < 0.01


def test_workers_and_processes_see_the_same(tmp_path):
    assert_shared(partial(load, shards(tmp_path), SPEC, random_crop=True, random_flip=True), 0, 4, 1)


def test_a_sample_without_or_with_a_broken_control_is_left_out(tmp_path):
    """The limit of a control's bytes is that of images, not that of other members."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 840, 3), dtype=np.uint8))
    large = encoded(noise, "PNG")
    assert len(large) > 1 << 20
    loader = load(shards(tmp_path, {3: b"no picture", 4: large}), SPEC, max_broken=0.5)
    loader.batch_at(range(8))
    assert loader.broken == 1
    with refused(r"holds no controls \(no .depth.png members\); found: .*\.cond.png"):
        load(tmp_path, replace(SPEC, control=ControlSpec("depth.png")))


def test_a_control_needs_an_image():
    for image in (None, replace(SPEC.image, read=False)):
        with refused("a control belongs to an image"):
            SampleSpec(image, (CaptionSpec(Letters(), 8),), control=ControlSpec("cond.png"))


def test_smart_crops_are_refused(tmp_path):
    with refused("saliency crops an image and its control differently"):
        load(shards(tmp_path), SPEC, saliency="opencv")
    with refused("saliency crops an image and its control differently"):
        Loader(DataConfig((str(tmp_path),)), SPEC, saliency=lambda picture: picture[..., 0])
