"""The settings of decoding, reading ahead of it, and the memory of a long stream."""

import gc
import itertools
import sys
from dataclasses import fields

import pytest
import torch
from refusing import refused
from shard_making import encoded, load, make_tar, random_image

from diff_dalle.config import Leaf, members
from diff_dalle.data import samples
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.images import decode
from diff_dalle.images.preprocessing import TransformConfig

COUNT = 12


@pytest.fixture
def shards(tmp_path):
    files = [(f"{i:02d}.jpg", encoded(random_image(160 + i, 200 - i, seed=i))) for i in range(COUNT)]
    make_tar(tmp_path / "0.tar", files)
    return str(tmp_path)


def loader(folder, **settings) -> Loader:
    return load(folder, SampleSpec(ImageSpec((20, 20))), **{"exact_decode": False, "streams": 1, **settings})


def images(folder, **settings) -> torch.Tensor:
    return loader(folder, **settings).batch_at(range(COUNT)).images


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"decode_scale": 1},
        {"exact_decode": True},
        {"random_crop": True, "random_flip": True},
        {"transforms": (TransformConfig("RandomResizedCrop", (20,)),)},
    ],
)
def test_decoders_give_the_same_images(shards, settings, monkeypatch):
    pytest.importorskip("simplejpeg")
    expected = images(shards, **settings)
    monkeypatch.setattr("diff_dalle.images.decode._decode", None)  # Pillow decodes none
    assert torch.equal(expected, images(shards, decoder="simplejpeg", **settings))


@pytest.mark.parametrize("settings", [{}, {"transforms": (TransformConfig("Resize", (20,)),)}])
def test_a_larger_scale_is_closer_to_the_full_size(shards, settings):
    exact = images(shards, exact_decode=True, **settings)
    assert torch.equal(exact, images(shards, exact_decode=True, decode_scale=1, **settings))
    errors = [float((images(shards, decode_scale=k, **settings) - exact).square().mean()) for k in (1, 2, 4, 8)]
    assert errors[0] > 2 * errors[1] > 2 * errors[2] > 2 * errors[3] == 0


def test_a_run_keeps_what_its_pixels_depend_on():
    known = members(DataConfig)
    free = {each.name for each in fields(DataConfig) if isinstance(known[each.name], Leaf) and known[each.name].free}
    assert not free & {"decoder", "decode_scale", "exact_decode"} and "num_workers" in free


def test_settings_that_cannot_be_used_are_refused(shards, monkeypatch):
    with refused("decode_scale is 0, but must be at least 1"):
        DataConfig(decode_scale=0)
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    assert loader(shards).samples == COUNT
    DataConfig(decoder="simplejpeg")  # such as that of a checkpoint, to sample from
    with refused(r"pip install 'diff_dalle\[jpeg\]'"):
        loader(shards, decoder="simplejpeg")


@pytest.mark.parametrize("ahead", [1, 3, COUNT])
def test_few_bytes_are_read_ahead(tmp_path, monkeypatch, ahead):
    """Samples are decoded in order, after as many have been read as reach the limit, of all members: again and
    again."""
    jpeg = encoded(random_image(20, 20))
    kinds = {"jpg": jpeg, "cls": b"1".ljust(1000)}
    files = [(f"{i:02d}.{kind}", data) for i in range(COUNT) for kind, data in kinds.items()]
    make_tar(tmp_path / "0.tar", files)
    data = load(tmp_path, SampleSpec(ImageSpec((20, 20)), num_classes=2), streams=1, exact_decode=False)
    fetch, decode, events = data.collection.fetch, data.dataset._decode, []
    expected = data.batch_at(range(COUNT)).images
    monkeypatch.setattr(samples, "READ_AHEAD", ahead * (len(jpeg) + 1000))
    monkeypatch.setattr(data.collection, "fetch", lambda *place: events.append(1) or fetch(*place))
    monkeypatch.setattr(data.dataset, "_decode", lambda *call: events.append(-1) or decode(*call))
    assert torch.equal(expected, data.batch_at(range(COUNT)).images)
    assert events == (ahead * [1] + ahead * [-1]) * (COUNT // ahead)


def test_a_long_stream_leaves_no_objects_behind(tmp_path):
    """In the process that prepares samples and in the one that receives them, which here are the same."""
    jpeg = encoded(random_image(20, 20))
    make_tar(tmp_path / "0.tar", [(f"{i:04d}.jpg", jpeg) for i in range(256)])
    batches, counts = loader(str(tmp_path), random_flip=True).batches(0), []
    for _ in range(3):
        for _ in itertools.islice(batches, 64):  # an epoch: caches grow with epochs, up to their limits
            pass
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[2] - counts[1] < 128  # one object of each sample would be 256
