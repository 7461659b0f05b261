"""Ready-made controls beside the images of shards: the same crop and flip as the image's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.data.aspect_buckets import AspectConfig
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import CaptionSpec, ControlSpec, ImageSpec, SampleSpec
from diff_dalle.errors import InputError
from diff_dalle.images.preprocessing import TransformConfig
from diff_dalle.text.tokenizer import load_tokenizer

SPEC = SampleSpec(ImageSpec((16, 16)), control=ControlSpec("Cond.png"))


def shards(folder, controls=None, name="cond.png") -> tuple[str, ...]:
    """Images whose control is the image upside down in brightness; controls: others, by number."""
    files = []
    for i in range(8):
        image = random_image(20, 24, i)
        control = Image.fromarray(255 - np.asarray(image))
        files.append((f"{i:03d}.png", encoded(image, "PNG")))
        files.append((f"{i:03d}.{name}", (controls or {}).get(i, encoded(control, "PNG"))))
        files.append((f"{i:03d}.txt", b"a picture"))
    (folder / "0.tar").write_bytes(tar_bytes(files))
    return (str(folder),)


def load(sources, spec=SPEC, n=16, **settings):
    return Loader(DataConfig(num_workers=0, **settings), spec, sources=sources).batch_at(range(n))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"random_crop": True, "random_flip": True},
        {"multi_aspect_ratio": True},
        {"transforms": True},
    ],
    ids=str,
)
def test_the_control_shows_the_same_part_as_the_image(tmp_path, settings):
    if settings.pop("multi_aspect_ratio", False):
        settings["aspect"] = AspectConfig(multi_aspect_ratio=("1/1", "3/2"), bucket_factor=4)
    if settings.pop("transforms", False):
        settings["transforms"] = (TransformConfig("RandomResizedCrop", (16,)), TransformConfig("RandomHorizontalFlip"))
    batch = load(shards(tmp_path), n=1 if "aspect" in settings else 16, **settings)
    control = batch.cond.control
    assert control.shape == batch.images.shape and control.dtype == torch.float32
    assert control.min() >= 0 and control.max() <= 1
    assert ((1 - control) - (batch.images + 1) / 2).abs().max() < 0.02


def test_a_gray_control_has_one_channel(tmp_path):
    sources = shards(tmp_path)
    gray, colors = (load(sources, replace(SPEC, control=ControlSpec("cond.png", n))).cond.control for n in (1, 3))
    assert gray.shape == (16, 1, 16, 16)
    luma = (colors * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    assert (gray - luma).abs().max() < 0.01


def test_workers_and_processes_see_the_same(tmp_path):
    sources = shards(tmp_path)
    whole = load(sources, random_crop=True, random_flip=True)
    loader = Loader(DataConfig(num_workers=1, random_crop=True, random_flip=True), SPEC, 0, 4, 1, 2, sources=sources)
    part = next(loader.batches(0))
    assert torch.equal(part.cond.control, whole.cond.control[1:8:2])


def test_a_sample_without_or_with_a_broken_control_is_left_out(tmp_path):
    sources = shards(tmp_path, {3: b"no picture"})
    loader = Loader(DataConfig(num_workers=0, max_broken=0.5), SPEC, sources=sources)
    loader.batch_at(range(16))
    assert loader.broken == 1
    with pytest.raises(InputError, match=r"holds no controls \(no .depth.png members\); found: .*\.cond.png"):
        load(sources, SampleSpec(ImageSpec((16, 16)), control=ControlSpec("depth.png")))


def test_a_large_control_is_read(tmp_path):
    """Its limit is that of images, not that of other members."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8))
    large = encoded(noise, "PNG")
    assert len(large) > 1 << 20
    loader = Loader(DataConfig(num_workers=0), SPEC, sources=shards(tmp_path, {i: large for i in range(8)}))
    loader.batch_at(range(8))
    assert not loader.broken


def test_a_control_needs_an_image():
    caption = CaptionSpec(load_tokenizer(), 8)
    with pytest.raises(InputError, match="a control belongs to an image"):
        SampleSpec(captions=(caption,), control=ControlSpec("cond.png"))


def test_smart_crops_are_refused(tmp_path):
    with pytest.raises(InputError, match="saliency crops an image and its control differently"):
        Loader(DataConfig(num_workers=0), SPEC, sources=shards(tmp_path), saliency=lambda picture: picture[..., 0])
