import os
import signal
from functools import partial
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from PIL import Image
from refusing import refused
from shard_making import (
    Letters,
    assert_same,
    assert_shared,
    captions_of,
    encoded,
    load,
    make_shards,
    make_tar,
    random_image,
    sample,
    take,
)
from torch.nn.functional import avg_pool2d

from diff_dalle.data import workers
from diff_dalle.data.inspection import read_captions
from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.spec import CaptionSpec, ImageSpec, SampleSpec
from diff_dalle.data.workers import worker_count
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.images.decode import decode_image
from diff_dalle.images.preprocessing import TransformConfig
from diff_dalle.images.transforms import Window, center_crop, random_cover, random_crop
from diff_dalle.randomness import random_uniform


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path, [7, 3, 5, 4])


def spec_of(size=(16, 16), tokenize=Letters(), window=None, num_classes=0) -> SampleSpec:  # noqa: B008 (stateless)
    return SampleSpec(ImageSpec(size, window=window), (CaptionSpec(tokenize, 20),) if tokenize else (), num_classes)


WINDOWED = spec_of((32, 32), window=Window(16, 4))


def loader(folder, spec=None, **options) -> Loader:
    return load(folder, spec or spec_of(), **options)


def test_a_sample_is_its_image_and_its_caption(shards):
    data = loader(shards, shuffle=False, streams=1)
    batch = data.batch_at(range(19))
    assert captions_of(batch) == [f"caption of {i:04d}" for i in range(19)] == read_captions([shards], "txt")
    assert batch.images.dtype == torch.float32 and batch.images.shape == (19, 3, 16, 16)
    for i in (0, 18):
        jpeg = dict(sample(f"{i:04d}"))[f"{i:04d}.jpg"]
        pixels = center_crop(*decode_image(jpeg, 10**6), (16, 16))
        torch.testing.assert_close(batch.images[i], torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1)
    assert data.describe(11) == f"{shards}/00002.tar : 0011"


@pytest.mark.parametrize(
    ("setting", "device", "cores", "beside", "count"),
    [
        (None, "cpu", 64, 1, 2),
        (None, "cuda", 64, 8, 7),
        (None, "cuda", 64, 1, 16),
        (None, "cuda", 2, 1, 2),
        (0, "cuda", 64, 8, 0),
        (40, "cuda", 8, 8, 40),
    ],
)
def test_workers_are_as_many_as_are_set_or_as_a_gpu_has_cores(setting, device, cores, beside, count, monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    assert worker_count(setting, torch.device(device), beside) == count


def test_processes_of_a_machine_share_its_cores(shards, monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 12)
    world = World(SINGLE, torch.device("cpu"))
    world.node_of = (0, 0, 1)
    found = load(shards, spec_of(), num_workers=None, device="meta", world=world)
    assert found.workers == 5


@pytest.mark.parametrize("spec", [None, WINDOWED])
def test_workers_processes_and_restarts_change_nothing(shards, spec):
    """Batches larger than a worker's chunk, with random crops and flips, over several epochs."""
    assert_shared(partial(loader, shards, spec, random_crop=True, random_flip=True), 40, 40, 2)


@pytest.mark.parametrize("world, spec", [(2, None), (3, WINDOWED), (4, WINDOWED), (7, None), (12, WINDOWED)])
def test_any_number_of_processes_shares_the_same_samples(shards, world, spec):
    size, options = max(1, 8 // world), {"random_crop": True, "random_flip": True}
    whole = take(loader(shards, spec, batch_size=size * world, **options), 0, 3)
    for rank in range(world):
        part = take(loader(shards, spec, batch_size=size, rank=rank, world_size=world, **options), 0, 3)
        for one, other in zip(whole, part, strict=True):
            assert_same(one.select(slice(rank, None, world)), other)


def test_an_epoch_has_every_caption_once_and_the_next_or_another_seed_another_order(shards):
    data = loader(shards)
    first, second = (captions_of(data.batch_at(range(start, start + 19))) for start in (0, 19))
    assert data.samples == 19 and sorted(first) == sorted(second) == [f"caption of {i:04d}" for i in range(19)]
    other = captions_of(loader(shards, seed=1).batch_at(range(19)))
    assert len(set(map(tuple, (first, second, other)))) == 3


def test_random_crops_and_flips_follow_the_position(shards):
    crops = loader(shards, random_crop=True).batch_at([3] * 2 + [3 + 19 * k for k in range(1, 4)])
    assert torch.equal(crops.images[0], crops.images[1])
    plain = loader(shards).batch_at(range(19)).images
    flipped = loader(shards, random_flip=True).batch_at(range(19)).images
    same = [torch.equal(a, b) for a, b in zip(plain, flipped, strict=True)]
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(plain, flipped, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)) and 3 < sum(same) < 16


def test_each_crop_and_flip_has_a_draw_of_its_own(shards):
    """Keyed by name: a new draw must not change the others, or running jobs would see other crops."""
    data = loader(shards, seed=5, random_crop=True, random_flip=True)
    for position in range(8):
        u = [random_uniform(5, name, [position])[0] for name in ("crop size", "crop top", "crop left", "flip")]
        key = data.describe(position)[-4:]
        image, full = decode_image(dict(sample(key))[f"{key}.jpg"], 10**6)
        expected = random_crop(image, full, (16, 16), random_cover((16, 16), u[0]), u[1:3])
        expected = expected[:, ::-1] if u[3] < 0.5 else expected
        images = (data.batch_at([position]).images + 1) * 127.5
        np.testing.assert_array_equal(images[0].round().permute(1, 2, 0), expected)


@pytest.mark.parametrize("cropped", [False, True])
def test_a_window_is_part_of_the_image_without_one(shards, cropped):
    """Also with random crops; a flip mirrors the window in place, so the window's downsampled area is the same."""
    positions, spec, options = range(40), spec_of((24, 32), window=Window(12, 4)), {"random_crop": cropped}
    whole = loader(shards, spec_of((24, 32)), **options).batch_at(positions)
    parts = loader(shards, spec, **options).batch_at(positions)
    flipped = loader(shards, spec, random_flip=True, **options).batch_at(positions).images
    assert whole.images.shape == (40, 3, 24, 32)
    assert parts.images.shape == (40, 3, 12, 12) and torch.equal(parts.index, whole.index)
    tops = 4 * (random_uniform(0, "window top", positions) * 4).astype(int)
    lefts = 4 * (random_uniform(0, "window left", positions) * 6).astype(int)
    assert len(set(zip(tops, lefts, strict=True))) > 15
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        assert torch.equal(parts.images[i], whole.images[i, :, top : top + 12, left : left + 12])
        small = avg_pool2d(whole.images[i], 4)[:, top // 4 : top // 4 + 3, left // 4 : left // 4 + 3]
        torch.testing.assert_close(avg_pool2d(parts.images[i], 4), small, rtol=0, atol=1e-6)
        assert torch.equal(flipped[i], parts.images[i]) or torch.equal(flipped[i], parts.images[i].flip(-1))
    assert 10 < sum(torch.equal(a, b) for a, b in zip(flipped, parts.images, strict=True)) < 30


def broken_shards(folder, bad: dict[int, bytes | None]) -> str:
    files = []
    for i in range(16):
        files += sample(f"{i:04d}", f"caption of {i:04d}", bad.get(i))
    make_tar(folder / "a.tar", files)
    return str(folder)


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_replaced_by_the_next_of_their_stream_and_named(tmp_path, caplog, workers):
    bomb = encoded(random_image(400, 400), "PNG")
    options = {"streams": 4, "max_pixels": 100_000, "num_workers": workers, "max_broken": 0.5, "batch_size": 16}
    order = captions_of(loader(broken_shards(tmp_path, {}), **options).batch_at(range(16)))
    number = [int(caption[-4:]) for caption in order]
    bad = {number[2]: b"no image", number[6]: bomb, number[15]: encoded(random_image(99, 99))[:-100]}
    data = loader(broken_shards(tmp_path, bad), **options)
    (batch,) = take(data, 0, 1)
    assert captions_of(batch) == [*order[:2], order[10], *order[3:6], order[10], *order[7:15], captions_of(batch)[15]]
    assert captions_of(batch)[15] == captions_of(data.batch_at([19]))[0]  # in the next epoch
    assert batch.index.tolist() == list(range(16))
    assert data.broken == 3  # though position 2 met two of them
    for i in bad:
        assert caplog.text.count(f"a.tar : {i:04d}: ") == 1
    assert "too many pixels" in caplog.text and "not a readable image" in caplog.text


def test_too_many_broken_samples_stop_the_run_with_their_reasons(tmp_path):
    half = broken_shards(tmp_path, dict.fromkeys(range(8), b"no image"))
    data = loader(half, streams=1, num_workers=1)
    with refused(r"are broken, more than max_broken 0\.02 allows: .*a\.tar : 000\d: not a"):
        take(data, 0, 40)
    nothing = broken_shards(tmp_path, dict.fromkeys(range(16), b"no image"))
    with refused("256 consecutive samples cannot be used"):
        take(loader(nothing, num_workers=1), 0, 1)


def test_a_broken_stream_of_held_out_data_is_replaced_from_the_others(tmp_path):
    """Unshuffled, all epochs of a stream may hold the same few samples."""
    folder = broken_shards(tmp_path, dict.fromkeys((2, 3), b"no image"))
    data = loader(folder, streams=8, shuffle=False)
    assert captions_of(data.batch_at([1, 9])) == ["caption of 0004", "caption of 0005"]


def test_a_caption_of_megabytes_is_not_read(tmp_path):
    files = [file for i in range(3) for file in sample(f"{i:04d}", "x" * (2 << 20) if i == 1 else f"caption {i}")]
    make_tar(tmp_path / "a.tar", files)
    data = loader(tmp_path, streams=1, max_broken=1.0)
    raw = data.collection.fetch(0, 1)
    assert raw.members == {} and "2,097,152 bytes, more than 1,048,576" in str(raw.problem)
    assert {caption[:9] for caption in captions_of(data.batch_at(range(3)))} == {"caption 0", "caption 2"}
    assert data.broken == 1


def test_a_sample_that_its_shard_ends_inside_is_not_used(tmp_path):
    """As a damaged index could place it: what indexing reads lies within the shard."""
    folder = make_shards(tmp_path, [2])
    found = loader(folder).collection
    spans = found.members(0).spans["txt"]
    end = found.shards[0].size
    spans[1] = end - 4, 4
    assert found.fetch(0, 1).problem is None
    spans[1] = end - 4, 5
    raw = found.fetch(0, 1)
    assert raw.members == {} and str(raw.problem) == "the shard ends inside it"


def test_captions_may_be_a_field_of_json(tmp_path):
    image = encoded(random_image())
    records = [b'{"caption": " one "}', b'{"caption": null}', b"{", b'{"caption": "two"}', b'{"other": "x"}']
    records.append(b"[" * 100_000)
    files = [pair for i, r in enumerate(records) for pair in ((f"{i}.jpg", image), (f"{i}.json", r))]
    make_tar(tmp_path / "a.tar", files)
    data = loader(tmp_path, caption_field="json:caption", max_broken=1.0)
    assert set(captions_of(data.batch_at(range(6)))) == {"one", "two"}


def test_images_can_be_left_out(shards):
    batch = loader(shards, SampleSpec(captions=spec_of().captions), shuffle=False, streams=1).batch_at(range(4))
    assert batch.images.shape == (4, 0, 0, 0) and len(batch) == 4
    assert captions_of(batch) == [f"caption of {i:04d}" for i in range(4)]
    assert [len(part) for part in batch.split(3)] == [3, 1] and len(batch.select([2, 0])) == 2


def test_gray_files_keep_their_levels(tmp_path):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    make_tar(tmp_path / "a.tar", [("0.png", encoded(Image.fromarray(levels), "PNG"))])
    images = loader(tmp_path, SampleSpec(ImageSpec((16, 16), channels=1))).batch_at([0]).images
    assert ((images[0, 0] + 1) * 127.5).round().byte().tolist() == levels.tolist()


def test_an_empty_caption_counts_as_missing_only_where_captions_are_needed(tmp_path, caplog):
    make_tar(tmp_path / "a.tar", sample("1", "one") + sample("2") + sample("3", ""))
    without = loader(tmp_path, spec_of(tokenize=None))
    assert without.samples == 3 and without.batch_at([0]).cond.present() == {} and not caplog.text
    assert loader(tmp_path).samples == 1 and "2 samples left out: without an image or a .txt" in caplog.text


def test_classes_come_from_cls_members(tmp_path):
    classes = (b"7\n", b"seven", b"8", b"9" * 5000)
    files = [file for i in range(4) for file in [*sample(f"{i}"), (f"{i}.cls", classes[i])]]
    make_tar(tmp_path / "a.tar", files)
    batch = loader(tmp_path, spec_of(tokenize=None, num_classes=8), max_broken=1.0).batch_at(range(4))
    assert batch.cond.labels.tolist() == [7] * 4 and batch.cond.tokens is None


class Wrong(Letters):
    def __call__(self, texts, length):
        raise KeyError("a bug in the tokenizer")


def test_more_workers_and_processes_than_shards(tmp_path):
    folder = make_shards(tmp_path, [3])
    batches = [take(loader(folder, num_workers=2, batch_size=1, rank=r, world_size=4), 0, 3) for r in range(4)]
    together = [captions_of(batches[p % 4][p // 4])[0] for p in range(12)]
    assert all(len(set(together[i : i + 3])) == 3 for i in range(0, 12, 3))


def test_a_bug_in_a_worker_is_passed_on(shards):
    with pytest.raises(KeyError, match="a bug in the tokenizer"):
        take(loader(shards, spec_of(tokenize=Wrong()), num_workers=2), 0, 1)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs POSIX signals")
def test_workers_outlive_a_signal_to_the_job_and_end_with_the_iterator(shards):
    data = loader(shards, num_workers=2, prefetch=2)
    before = set(active_children())
    batches = data.batches(0)
    next(batches)
    workers = set(active_children()) - before
    assert len(workers) == 2
    for process in workers:
        process.terminate()
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(process.pid, number)
    for _ in range(20):
        next(batches)
    batches.close()
    assert not any(process.is_alive() for process in workers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": -1}, "num_workers is -1, but must be at least 0"),
        ({"streams": -1}, "streams is -1, but must be at least 0"),
        ({"data_timeout": float("nan")}, "data_timeout is nan"),
        ({"max_pixels": 10**9}, "max_pixels is 1000000000, but Pillow decodes at most"),
        ({"max_broken": 2.0}, "max_broken is 2, but must be at least 0 and at most 1"),
        *(({"caption_field": field}, "caption_field") for field in ("json", "json:", "txt:caption", "")),
        (
            {"transforms": (TransformConfig("Resize", (20,)),), "random_flip": True},
            "random_flip is a transform too: leave it out beside transforms",
        ),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with refused(message):
        DataConfig(**change)


def test_an_impossible_batch_size_is_refused(shards):
    with refused("batch_size is 0, but must be at least 1"):
        loader(shards, batch_size=0)
