import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
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
    npy_bytes,
    random_image,
    take,
)

from diff_dalle.config import from_dict
from diff_dalle.data import captions, samples
from diff_dalle.data.loader import Loader
from diff_dalle.data.shard_table import IMAGE
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.sidecars import Sidecar
from diff_dalle.data.spec import CaptionSpec, EmbeddingSpec, ImageSpec, JsonFilter, Rejected, SampleSpec
from diff_dalle.data.tar import read_members
from diff_dalle.images.preprocessing import TransformConfig
from diff_dalle.images.transforms import Window

IMAGES = ImageSpec((16, 16))
CAPTION = CaptionSpec(Letters(), 20)
SIDECAR = Sidecar("{}.npy")


class Capitals(Letters):
    """Another tokenizer."""

    def __call__(self, texts, length):
        return super().__call__([text.upper() for text in texts], length)


def loader(folder, spec, **options) -> Loader:
    return load(folder, spec, **{"streams": 1, "shuffle": False, **options})


def embedding_of(number: int, width: int = 8) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(width).astype(np.float32)


def rich_sample(number: int, **members: bytes) -> list[tuple[str, bytes]]:
    """A sample with every kind of member, some of them replaced."""
    key = f"{number:04d}"
    kinds = {
        "cls": b"3",
        "img_emb.npy": npy_bytes(embedding_of(number)),
        "jpg": encoded(random_image(seed=number)),
        "json": json.dumps({"score": number, "caption": f"json {key}", "other": "x" * 1000}).encode(),
        "npy": npy_bytes(embedding_of(100 + number)),
        "txt": f"caption of {key}".encode(),
    }
    kinds |= members
    return [(f"{key}.{kind}", data) for kind, data in kinds.items()]


@pytest.fixture
def rich(tmp_path):
    make_tar(tmp_path / "a.tar", [file for i in range(10) for file in rich_sample(i)])
    return tmp_path


def score_between(low, high, score) -> bool:
    return low <= score < high


def between(low, high, name="score") -> JsonFilter:
    return JsonFilter(name, ("score",), partial(score_between, low, high))


STORED = SampleSpec(
    replace(IMAGES, read=False), (replace(CAPTION, read=False),), embeddings=(EmbeddingSpec(8, "npy", stored=True),)
)
SPECS = {
    "images": (SampleSpec(IMAGES), {"jpg"}),
    "captions": (SampleSpec(captions=(CAPTION,)), {"txt"}),
    "images and captions": (SampleSpec(IMAGES, (CAPTION,)), {"jpg", "txt"}),
    "embeddings": (SampleSpec(embeddings=(EmbeddingSpec(8, "img_emb.npy"),)), {"img_emb.npy"}),
    "classes": (SampleSpec(num_classes=4), {"cls"}),
    "images and classes": (SampleSpec(IMAGES, num_classes=4), {"jpg", "cls"}),
    "what stands for an image and a caption": (STORED, {"npy"}),
    "a filter": (SampleSpec(captions=(CAPTION,), filters=(between(0, 99),)), {"txt", "json"}),
}


@pytest.mark.parametrize("name", SPECS)
def test_no_byte_of_a_member_that_nobody_asked_for_is_read(rich, monkeypatch, name):
    spec, asked = SPECS[name]
    data = loader(rich, spec)
    tar = (rich / "a.tar").read_bytes()
    members, _ = read_members(lambda offset, size: tar[offset : offset + size], len(tar))
    read, touched = np.zeros(len(tar), dtype=bool), ShardFiles.read

    def spy(self, shard, offset, size):
        read[offset : offset + size] = True
        return touched(self, shard, offset, size)

    monkeypatch.setattr(ShardFiles, "read", spy)
    data.batch_at(range(10))
    for member in members:
        kind = member.name.partition(".")[2]
        assert read[member.offset : member.offset + member.size].all() == (kind in asked), member.name
        assert read[member.offset : member.offset + member.size].any() == (kind in asked), member.name


def test_members_that_are_adjacent_are_read_at_once(tmp_path, monkeypatch):
    make_shards(tmp_path, [5])
    data = loader(tmp_path, SampleSpec(IMAGES, (CAPTION,)))
    reads, read = [], ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda *call: reads.append(call) or read(*call))
    assert len(captions_of(data.batch_at(range(5)))) == len(reads) == 5


LACKING = ("0000.jpg", "0001.txt", "0002.npy")


def test_samples_need_only_what_is_asked_for(tmp_path, caplog):
    """Each of these lacks one kind of member."""
    files = [file for i in range(3) for file in rich_sample(i) if file[0] not in LACKING]
    make_tar(tmp_path / "a.tar", files)
    for spec, missing, kind in (
        (SampleSpec(IMAGES), 0, "an image"),
        (SampleSpec(captions=(CAPTION,)), 1, "a .txt"),
        (SampleSpec(embeddings=(EmbeddingSpec(8, "npy"),)), 2, "a .npy"),
    ):
        data = loader(tmp_path, spec)
        assert [data.describe(i)[-4:] for i in range(data.samples)] == [f"{i:04d}" for i in range(3) if i != missing]
        assert f"1 sample left out: without {kind}" in caplog.text


def test_what_stands_for_an_image_is_of_the_same_samples(tmp_path):
    """Those that have one, which may be read in its place, and a caption."""
    files = [file for i in range(4) for file in rich_sample(i) if file[0] not in LACKING]
    files += rich_sample(4, npy=npy_bytes(np.zeros(8, "f4")))
    make_tar(tmp_path / "a.tar", files)
    data = loader(tmp_path, STORED)
    assert data.samples == 2 and STORED.whole == SampleSpec(IMAGES, (CAPTION,))
    batch = data.batch_at([0, 1])
    assert batch.cond.image_embedding.shape == (2, 8) and batch.images.shape == (2, 0, 0, 0)
    assert (data.missing, data.broken) == (1, 0) and torch.equal(*batch.cond.image_embedding)
    whole = data.reading_whole().first(2)
    assert whole.images.shape == (2, 3, 16, 16) and captions_of(whole) == ["caption of 0003", "caption of 0004"]
    assert list(whole.cond.present()) == ["tokens", "mask"]
    kept = SampleSpec(IMAGES, embeddings=(EmbeddingSpec(8, "npy"),))
    assert kept.whole == kept


def test_gray_images_have_one_channel(rich):
    """The luma of the RGB image after the same crop and flip."""
    color, gray = (
        loader(rich, SampleSpec(ImageSpec((16, 16), n)), random_crop=True, random_flip=True).batch_at(range(10)).images
        for n in (3, 1)
    )
    assert gray.shape == (10, 1, 16, 16)
    for rgb, one in zip(color, gray, strict=True):
        pixels = ((rgb + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
        expected = np.asarray(Image.fromarray(pixels).convert("L"))
        np.testing.assert_array_equal(((one[0] + 1) * 127.5).round().byte().numpy(), expected)


def test_several_tokenizers_fill_fields_of_their_own(rich):
    captions = (CAPTION, CaptionSpec(Capitals(), 30, "t5"))
    cond = loader(rich, SampleSpec(IMAGES, captions)).batch_at(range(3)).cond
    assert set(cond.present()) == {"tokens", "mask", "extra.t5_tokens", "extra.t5_mask"}
    assert cond.tokens.shape == (3, 20) and cond.extra["t5_tokens"].shape == (3, 30)
    assert bytes(cond.extra["t5_tokens"][1][cond.extra["t5_mask"][1]].tolist()) == b"CAPTION OF 0001"


def test_unusable_embeddings_are_broken_samples(tmp_path, caplog):
    bad = {1: {"npy": b"0.1 0.2 0.3"}, 3: {"npy": npy_bytes(np.ones(1 << 21))}}
    files = [file for i in range(5) for file in rich_sample(i, **bad.get(i, {}))]
    make_tar(tmp_path / "a.tar", files)
    data = loader(tmp_path, SampleSpec(IMAGES, embeddings=(EmbeddingSpec(8, "npy"),)), max_broken=0.5)
    batch = data.batch_at(range(5))
    expected = np.stack([embedding_of(100 + i) for i in (0, 2, 2, 4, 4)])
    np.testing.assert_array_equal(batch.cond.image_embedding.numpy(), expected)
    assert data.broken == 2
    assert re.search(r"a\.tar : 0001: .*cannot be read: not a .npy file", caplog.text)
    assert re.search(r"a\.tar : 0003: one of its members has 16,777,344 bytes", caplog.text)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            SampleSpec(IMAGES, embeddings=(EmbeddingSpec(8, "npy"),)),
            r"no embeddings \(no \.npy members\); found: \.jpg \(3\), \.txt \(3\)",
        ),
        (SampleSpec(IMAGES, filters=(between(0, 1),)), r"no json records \(no \.json members\)"),
        (SampleSpec(captions=(CAPTION,)), r"no captions \(no \.json members; set caption_field\)"),
    ],
)
def test_the_error_names_what_is_missing_and_what_it_is_for(tmp_path, spec, message):
    make_shards(tmp_path, [3])
    with refused(f"holds {message}"):
        loader(tmp_path, spec, caption_field="json:caption")


def test_a_json_record_is_parsed_once(rich, monkeypatch):
    """By filters and captions together, also of samples that replace rejected ones."""
    spec = SampleSpec(captions=(CAPTION,), filters=(between(3, 99),))
    data = loader(rich, spec, caption_field="json:caption")
    parsed, loads = [], json.loads
    monkeypatch.setattr(captions.json, "loads", lambda text: parsed.append(loads(text)) or parsed[-1])
    batch = data.batch_at(range(10))
    assert captions_of(batch)[:5] == ["json 0003", "json 0003", "json 0003", "json 0003", "json 0004"]
    scores = [record["score"] for record in parsed if "score" in record]
    assert scores == [0, 1, 2, 3, 1, 2, 3, 2, 3, *range(3, 10)]


def test_rejected_samples_are_replaced_counted_and_no_reason_to_stop(rich, caplog):
    """All but one sample in ten are rejected, by two filters."""
    spec = SampleSpec(IMAGES, (CAPTION,), filters=(between(4, 99, "high"), between(0, 5, "low")))
    data = loader(rich, spec, num_workers=2, max_broken=0.0, batch_size=8)
    for batch in take(data, 0, 3):
        assert captions_of(batch) == ["caption of 0004"] * 8
    # From sample s, the walk passes s, s+1, … in the order of the shard until it meets sample 4.
    passed = [s % 10 for position in range(24) for s in range(position % 10, position % 10 + (4 - position) % 10)]
    assert data.rejected == {"high": sum(s < 4 for s in passed), "low": sum(s > 4 for s in passed)}
    assert data.broken == 0 and "broken" not in caplog.text and "replaced" not in caplog.text
    assert "the filter 'low' has rejected" in caplog.text and "score = 9" in caplog.text


def test_replacements_for_rejected_samples_do_not_depend_on_workers_and_processes(rich):
    spec = SampleSpec(IMAGES, (CAPTION,), filters=(between(4, 99),))
    assert_shared(partial(loader, rich, spec, random_crop=True, streams=4, shuffle=True), 0, 40, 1)


def test_of_rejected_replacements_only_the_json_is_read(rich, monkeypatch):
    data = loader(rich, SampleSpec(IMAGES, filters=(between(9, 99),)))
    read, fetch = [], type(data.collection).fetch

    def noted(self, *place):
        read.append(fetch(self, *place))
        return read[-1]

    monkeypatch.setattr(type(data.collection), "fetch", noted)
    data.batch_at([0])
    assert [set(raw.members) for raw in read] == [{IMAGE, "json"}, *[{"json"}] * 9, {IMAGE, "json"}]


def test_when_everything_is_rejected_the_error_names_the_filter(rich, monkeypatch):
    monkeypatch.setattr(samples, "MAX_REJECTED", 300)
    spec = SampleSpec(IMAGES, filters=(between(0, 99, "fine"), between(50, 99, "aesthetics")))
    expected = r"the filter 'aesthetics' rejected 300 of 300 consecutive samples .*a\.tar : 000\d: score = \d; relax"
    with refused(expected):
        loader(rich, spec).batch_at([0])


def test_broken_samples_among_rejected_ones_are_counted_apart(tmp_path):
    files = [file for i in range(6) for file in rich_sample(i, **({"json": b"{"} if i == 2 else {}))]
    files += rich_sample(6, jpg=b"no image") + rich_sample(7)
    make_tar(tmp_path / "a.tar", files)
    data = loader(tmp_path, SampleSpec(IMAGES, (CAPTION,), filters=(between(6, 99),)))
    assert captions_of(data.batch_at([0])) == ["caption of 0007"]
    assert data.rejected == {"score": 5} and data.broken == 2 and data.seen == 6


def accept_ratio(width, height) -> bool:
    return width / height < 2


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"width": 10}, "its json has no 'height'"),
        ({"width": 10, "height": 0}, "ZeroDivisionError: division by zero"),
        ({"width": "10", "height": 3}, "TypeError: unsupported operand"),
        ({"width": 10, "height": 4}, "width = 10, height = 4"),
    ],
)
def test_records_that_a_filter_cannot_judge_are_rejected(record, reason):
    accept = JsonFilter("a", ("width", "height"), accept_ratio)
    accept.check({"width": 10, "height": 9})
    with pytest.raises(Rejected, match=reason):
        accept.check(record)


FULL = SampleSpec(IMAGES, (CAPTION,), 4, (EmbeddingSpec(8, "npy"),), (between(2, 99),))


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs POSIX signals")
def test_a_full_spec_reaches_a_spawned_worker_which_outlives_a_signal_to_the_job_while_it_starts(rich):
    before, ended = set(active_children()), []

    def end_it_at_its_start():
        while not ended:
            for process in set(active_children()) - before:
                process.terminate()
                os.kill(process.pid, signal.SIGINT)
                ended.append(process)
            time.sleep(0.01)

    ending = threading.Thread(target=end_it_at_its_start, daemon=True)
    ending.start()
    spawned = {"num_workers": 1, "worker_start": "spawn"}
    (there,), (here,) = (take(loader(rich, FULL, shuffle=True, **options), 4, 1) for options in (spawned, {}))
    ending.join(5)
    assert len(ended) == 1
    assert_same(here, there)
    assert set(here.cond.present()) == {"tokens", "mask", "labels", "image_embedding"}


def test_every_tensor_of_a_chunk_is_pinned(rich, monkeypatch):
    """What DataLoader asks of batches for a GPU."""
    chunk = loader(rich, FULL).dataset.chunk([0, 3])
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.clone()) or pinned[-1])
    copy = chunk.pin_memory()
    tensors = [copy.index, copy.images, *copy.cond.values()]
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in pinned] and len(tensors) == 6
    assert torch.equal(copy.images, chunk.images) and copy.cond.keys() == chunk.cond.keys()
    assert copy.lost is chunk.lost and (chunk.lost.rejected, chunk.lost.reasons) == (
        {"score": 2},
        {"score": "score = 1"},
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (SampleSpec, "must hold something"),
        (lambda: ImageSpec((16, 0)), r"image size is \(16, 0\)"),
        (lambda: SampleSpec(captions=(CAPTION, CAPTION)), "fields of a sample .* mask occurs twice"),
        (lambda: SampleSpec(captions=(CAPTION,), embeddings=(EmbeddingSpec(8, "npy", length=3),)), "mask occurs twice"),
        (lambda: ImageSpec((16, 16), channels=4), "4 channels, but must have 3"),
        (lambda: ImageSpec((16, 16), window=Window(32, 4)), "crop_size is 32, but must be at most 16"),
        *(
            (
                lambda two=two: SampleSpec(embeddings=(EmbeddingSpec(8, SIDECAR), two)),
                "one width and length, but .* two",
            )
            for two in (EmbeddingSpec(9, SIDECAR, "b"), EmbeddingSpec(8, SIDECAR, "b", length=3))
        ),
        (
            lambda: SampleSpec(IMAGES, filters=(JsonFilter("a", ("x",), bool), JsonFilter("a", ("y",), bool))),
            "filters of a sample .* a occurs twice",
        ),
        (lambda: EmbeddingSpec(0, "npy"), "width of an embedding is 0"),
        (lambda: EmbeddingSpec(8, ".npy"), "source of an embedding is '.npy'"),
    ],
)
def test_impossible_specs_are_refused(make, message):
    with refused(message):
        make()


def crops(**settings) -> tuple[TransformConfig, ...]:
    listed = [{"name": "RandomResizedCrop", "size": 20, **settings}, {"name": "RandomHorizontalFlip"}]
    return tuple(from_dict(TransformConfig, each) for each in listed)


def test_transforms_follow_the_position_and_workers_change_nothing(rich):
    def images(seed=3, positions=range(6)):
        return loader(rich, SampleSpec(IMAGES), seed=seed, transforms=crops()).batch_at(positions).images

    (batch,) = assert_shared(partial(loader, rich, SampleSpec(IMAGES), seed=3, transforms=crops()), 0, 6, 1)
    assert batch.images.shape == (6, 3, 16, 16) and torch.equal(images(positions=[4]), batch.images[4:5])
    assert not torch.equal(images(4), batch.images)
    assert not torch.equal(images(positions=range(10, 16)), batch.images)  # the next epoch, in the same order


def test_without_augmentation_crops_lie_in_the_middle(rich):
    def images(start=0, **settings):
        data = loader(rich, SampleSpec(IMAGES), augment=False, **settings)
        assert data.dataset._draws([start]) == [[]]  # as many as nothing random needs
        return data.batch_at(range(start, start + 6)).images

    plain, settings = images(), {"transforms": crops(ratio=[1, 1])}
    found = images(**settings)
    assert torch.equal(found, images(10, **settings))
    assert (found - plain).abs().mean() < 0.1 < 0.2 < (plain.flip(3) - plain).abs().mean()
    assert torch.equal(images(random_crop=True, random_flip=True), plain)


def test_resampling_reaches_the_order_and_held_out_data_do_not_have_it(tmp_path):
    make_shards(tmp_path, [5] * 8)
    data, held_out = (loader(tmp_path, SampleSpec(IMAGES), resample=True, shuffle=shuffle) for shuffle in (True, False))
    assert len(set(data.order.samples_at(np.arange(40))[0].tolist())) < 8
    assert sorted(set(held_out.order.samples_at(np.arange(40))[0].tolist())) == list(range(8))
