"""The settings of decoding, reading ahead of it, and the memory of a long stream."""

import gc
import itertools
import sys
from dataclasses import fields

import pytest
import torch
from shard_making import encoded, load, random_image, tar_bytes

from diff_dalle.config import InputError, Leaf, members
from diff_dalle.data import samples
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import ImageSpec, SampleSpec
from diff_dalle.images import decode
from diff_dalle.images.preprocessing import TransformConfig

COUNT = 12


@pytest.fixture
def shards(tmp_path):
    files = [(f"{i:02d}.jpg", encoded(random_image(160 + i, 200 - i, seed=i))) for i in range(COUNT)]
    (tmp_path / "0.tar").write_bytes(tar_bytes(files))
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
    with pytest.raises(InputError, match="decode_scale is 0, but must be at least 1"):
        DataConfig(decode_scale=0)
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    assert loader(shards).samples == COUNT
    DataConfig(decoder="simplejpeg")  # such as that of a checkpoint, to sample from
    with pytest.raises(InputError, match=r"pip install 'diff_dalle\[jpeg\]'"):
        loader(shards, decoder="simplejpeg")


def reads_and_decodes(data: Loader, limit: int, monkeypatch) -> list[int]:
    """1 for each sample that is read, and -1 for each that is decoded, in order, when a chunk is made."""
    fetch, decode, events = data.collection.fetch, data.dataset._decode, []
    expected = data.batch_at(range(COUNT)).images

    def fetched(*place):
        events.append(1)
        return fetch(*place)

    def decoded(*args):
        events.append(-1)
        return decode(*args)

    monkeypatch.setattr(samples, "READ_AHEAD", limit)
    monkeypatch.setattr(data.collection, "fetch", fetched)
    monkeypatch.setattr(data.dataset, "_decode", decoded)
    assert torch.equal(expected, data.batch_at(range(COUNT)).images)
    return events


def in_turns(ahead: int) -> list[int]:
    return (ahead * [1] + ahead * [-1]) * (COUNT // ahead)


@pytest.mark.parametrize("limit, ahead", [(1, 1), (4000, 2), (1 << 22, COUNT)])
def test_few_bytes_are_read_ahead(shards, limit, ahead, monkeypatch):
    """Samples are decoded in order, after as many have been read as reach the limit: again and again."""
    data = loader(shards)
    sizes = [len(data.collection.fetch(*data.order.sample_at(i)).members["image/*"]) for i in range(COUNT)]
    assert max(sizes) < 4000 < 2 * min(sizes)
    assert reads_and_decodes(data, limit, monkeypatch) == in_turns(ahead)


def test_all_members_count_as_read(tmp_path, monkeypatch):
    jpeg = encoded(random_image(20, 20))
    files = [
        (f"{i:02d}.{kind}", data) for i in range(COUNT) for kind, data in (("jpg", jpeg), ("cls", b"1".ljust(1000)))
    ]
    (tmp_path / "0.tar").write_bytes(tar_bytes(files))
    spec = SampleSpec(ImageSpec((20, 20)), num_classes=2)
    data = load(tmp_path, spec, streams=1, exact_decode=False)
    assert reads_and_decodes(data, 3 * (len(jpeg) + 1000), monkeypatch) == in_turns(3)


def test_a_long_stream_leaves_no_objects_behind(tmp_path):
    """In the process that prepares samples and in the one that receives them, which here are the same."""
    jpeg = encoded(random_image(20, 20))
    (tmp_path / "0.tar").write_bytes(tar_bytes((f"{i:04d}.jpg", jpeg) for i in range(256)))
    batches, counts = loader(str(tmp_path), random_flip=True).batches(0), []
    for _ in range(3):
        for _ in itertools.islice(batches, 64):  # an epoch: caches grow with epochs, up to their limits
            pass
        gc.collect()
        counts.append(sys.getallocatedblocks())
    assert counts[2] - counts[1] < 128  # one object of each sample would be 256
