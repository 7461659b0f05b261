"""Computing embeddings into sidecar files: their rows, their names, what is missing, and going on after an end."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_making import make_classifier_file
from refusing import refused
from shard_making import encoded, load, make_tar, npy_bytes, random_image, sample

from diff_dalle import storage
from diff_dalle.data.collection import Collection, Unavailable
from diff_dalle.data.sidecars import Sidecar
from diff_dalle.data.spec import EmbeddingSpec, ImageSpec, SampleSpec
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings import computing
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.embeddings.computing import EmbeddingsConfig, compute_embeddings
from diff_dalle.embeddings.contract import Clip

COUNTS = {"00000": 5, "00001": 3, "00002": 4}


@pytest.fixture(scope="module")
def clip_path(tmp_path_factory):
    return make_classifier_file(tmp_path_factory.mktemp("clip"), noised=False)


@pytest.fixture(scope="module")
def clip(clip_path):
    return load_clip("diff_dalle", clip_path, "cpu")


def write_shard(folder, name, keys, **changed):
    """changed: images of keys, as bytes."""
    folder.mkdir(exist_ok=True)
    files = [file for key in keys for file in sample(key, f"caption {key}", changed.get(f"k{key}"))]
    make_tar(folder / f"{name}.tar", files)


@pytest.fixture
def config(tmp_path, clip_path):
    for name, count in COUNTS.items():
        write_shard(tmp_path / "shards", name, [f"{name[1:]}{i:04d}" for i in range(count)])
    return EmbeddingsConfig((str(tmp_path / "shards"),), clip_path=clip_path, out_dir=str(tmp_path / "out"))


def expected_images(folder, clip):
    """The embeddings of all samples, through the loader."""
    data = load(folder, SampleSpec(ImageSpec((16, 16))), streams=1, shuffle=False, exact_decode=False)
    return clip.encode_images(data.batch_at(range(data.samples)).images).numpy()


def record_of(folder):
    return json.loads((folder / "embeddings.json").read_text())


def hashes(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_file_for_each_shard_and_a_row_for_each_sample(config, tmp_path, clip, dtype):
    lines = compute_embeddings(replace(config, dtype=dtype, batch_size=2), ALONE)
    folder = tmp_path / "out" / "img_emb"
    assert sorted(os.listdir(folder)) == ["embeddings.json", *(f"img_emb_{name}.npy" for name in COUNTS)]
    found = [np.load(folder / f"img_emb_{name}.npy") for name in COUNTS]
    assert [each.shape for each in found] == [(count, 16) for count in COUNTS.values()]
    assert {each.dtype for each in found} == {np.dtype(dtype)}
    expected = expected_images(tmp_path / "shards", clip)
    tolerance = 1e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(np.concatenate(found), expected, atol=tolerance)
    assert lines == [f"{folder}: 12 embeddings [16] in {dtype}, 3 shards, by {clip.name}"]
    record = record_of(folder)
    assert record["counts"] == {"shards": 3, "samples": 12, "embeddings": 12, "missing": 0} and record["missing"] == {}
    assert (record["what"], record["clip"], record["identity"]) == ("image", clip.name, clip.identity)
    assert (record["shape"], record["dtype"], record["pattern"]) == ([16], dtype, "img_emb_{}.npy")
    assert record["made_from"] == "images, the shorter side resized to 16 pixels, center crop of 16 × 16"


def test_a_loader_reads_what_was_computed(config, tmp_path, clip):
    compute_embeddings(replace(config, what=("image", "text", "text_states"), dtype="float32"), ALONE)
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == ["img_emb", "text_emb", "text_states"]
    assert record_of(out / "text_emb")["made_from"] == "captions (txt)"
    assert record_of(out / "text_states")["shape"] == [12, 16]
    spec = SampleSpec(
        ImageSpec((16, 16)),
        embeddings=(
            EmbeddingSpec(16, Sidecar(str(out / "img_emb" / "img_emb_{}.npy"))),
            EmbeddingSpec(16, Sidecar(str(out / "text_emb" / "text_emb_{}.npy")), "text"),
            EmbeddingSpec(16, Sidecar(str(out / "text_states" / "text_states_{}.npy")), length=12),
        ),
    )
    options = {"streams": 1, "exact_decode": False}
    batch = load(tmp_path / "shards", spec, **options).batch_at(range(12))
    torch.testing.assert_close(batch.cond.image_embedding, clip.encode_images(batch.images))
    keys = {name: [f"{name[1:]}{i:04d}" for i in range(count)] for name, count in COUNTS.items()}
    embedding, states, mask = clip.encode_text([f"caption {key}" for part in keys.values() for key in part])
    in_order = load(tmp_path / "shards", spec, shuffle=False, **options).batch_at(range(12)).cond
    torch.testing.assert_close(in_order.extra["text_embedding"], embedding)
    torch.testing.assert_close(in_order.text_states, states)
    assert torch.equal(in_order.mask, mask)


def test_rows_of_unreadable_samples_are_zeros_and_named(config, tmp_path, clip):
    keys = ["0001", "0002", "0003"]
    write_shard(tmp_path / "shards", "00001", keys, k0002=b"no image")
    files = [("0004.txt", b"only text"), *sample("0005", "x")]
    make_tar(tmp_path / "shards" / "00002.tar", files)
    lines = compute_embeddings(config, ALONE)
    folder = tmp_path / "out" / "img_emb"
    assert np.load(folder / "img_emb_00001.npy").any(1).tolist() == [True, False, True]
    assert np.load(folder / "img_emb_00002.npy").any(1).tolist() == [False, True]
    record = record_of(folder)
    assert record["counts"] == {"shards": 3, "samples": 10, "embeddings": 8, "missing": 2}
    name = f"{tmp_path / 'shards' / '00001.tar'} : 0002"
    assert list(record["missing"]) == [name] and "not a jpeg, png or webp" in record["missing"][name]
    assert lines[1] == "2 samples without an embedding: 1 without an image, 1 that cannot be read"
    assert lines[2] == f"  {name}: not a jpeg, png or webp"


def test_keys_can_name_the_rows(config, tmp_path, clip):
    """As img2dataset's do, which leave gaps."""
    folder = tmp_path / "shards"
    for name in COUNTS:
        os.remove(folder / f"{name}.tar")
    write_shard(folder, "00042", ["000420005", "000420001", "last"])
    lines = compute_embeddings(replace(config, index_width=4), ALONE)
    found = np.load(tmp_path / "out" / "img_emb" / "img_emb_00042.npy")
    assert found.shape == (6, 16) and np.flatnonzero(found.any(1)).tolist() == [1, 5]
    np.testing.assert_allclose(found[[5, 1]], expected_images(folder, clip)[:2], atol=1e-3)
    assert lines[-1].endswith("last: its key does not end with 4 digits")


@pytest.mark.parametrize(
    ("keys", "width", "reason"),
    [
        (["a", "b"], 4, r"no key in .*00000\.tar ends with 4 digits, such as a: set index_width 0"),
        (["000010005", "000020005"], 4, r"00000\.tar : 000010005 and 000020005 would share row 5"),
        (["999999999", "000000001"], 9, "would make 1,000,000,000 rows for 2 samples"),
    ],
)
def test_keys_that_cannot_name_rows_are_refused(config, tmp_path, keys, width, reason):
    write_shard(tmp_path / "shards", "00000", keys)
    with refused(reason):
        compute_embeddings(replace(config, index_width=width), ALONE)


def counting(monkeypatch):
    """The numbers of pictures of all calls of the CLIP's."""
    calls, encode = [], Clip.encode_images
    monkeypatch.setattr(Clip, "encode_images", lambda clip, images: calls.append(len(images)) or encode(clip, images))
    return calls


def test_it_goes_on_where_it_was_ended(config, tmp_path, monkeypatch):
    compute_embeddings(config, ALONE)
    whole = hashes(tmp_path / "out")
    folder = tmp_path / "out" / "img_emb"
    os.remove(folder / "img_emb_00001.npy")
    record = record_of(folder)
    (folder / "embeddings.json").write_text(json.dumps({**record, "counts": {}}))
    calls = counting(monkeypatch)
    compute_embeddings(config, ALONE)
    assert hashes(tmp_path / "out") == whole
    assert calls == [2, 3, 2]  # of finished shards, the first and the last sample


def test_an_interrupted_file_is_not_there(config, tmp_path, monkeypatch):
    calls = counting(monkeypatch)
    write = computing.np.lib.format.write_array

    def interrupted(file, *arguments, **options):
        write(file, *arguments, **options)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(computing.np.lib.format, "write_array", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compute_embeddings(config, ALONE)
    folder = tmp_path / "out" / "img_emb"
    assert sorted(os.listdir(folder)) == ["embeddings.json", "img_emb_00000.npy"]
    assert record_of(folder)["counts"] == {}


def test_finished_files_are_verified(config, tmp_path):
    config = replace(config, dtype="float32")
    compute_embeddings(config, ALONE)
    whole, path = hashes(tmp_path / "out"), tmp_path / "out" / "img_emb" / "img_emb_00000.npy"
    array, data = np.load(path), path.read_bytes()
    for damaged in (
        data[:-1],
        data + b"\0",
        npy_bytes(array[:-1]),
        npy_bytes(array.astype("<f8")),
        npy_bytes(np.asfortranarray(array)),
        npy_bytes(np.concatenate([array[:-1], -array[-1:]])),
        npy_bytes(array * np.array([[1], [1], [0], [1], [1]], "<f4")),
        b"garbage",
    ):
        path.write_bytes(damaged)
        compute_embeddings(config, ALONE)
        assert hashes(tmp_path / "out") == whole


def test_what_is_missing_is_counted_again_and_tried_again(config, tmp_path, clip):
    """As is a shard that has changed."""
    write_shard(tmp_path / "shards", "00001", ["0001", "0002", "0003"], k0002=b"no image")
    compute_embeddings(config, ALONE)
    whole = hashes(tmp_path / "out")
    compute_embeddings(config, ALONE)
    assert hashes(tmp_path / "out") == whole
    write_shard(tmp_path / "shards", "00001", ["0001", "0002", "0003"], k0002=encoded(random_image()))
    write_shard(tmp_path / "shards", "00000", ["0007", "0001", "0002", "0003", "0004"])
    compute_embeddings(config, ALONE)
    found = np.load(tmp_path / "out" / "img_emb" / "img_emb_00000.npy")
    np.testing.assert_allclose(found, expected_images(tmp_path / "shards", clip)[:5], atol=1e-3)
    assert record_of(tmp_path / "out" / "img_emb")["counts"]["missing"] == 0


def test_a_folder_of_other_embeddings_is_refused(config, tmp_path, clip_path):
    compute_embeddings(config, ALONE)
    other = make_classifier_file(tmp_path, noised=False, classifier_enc_heads=1)
    for changed, reason in (
        ({"clip_path": other}, r"\(identity is diff_dalle .* there and diff_dalle .*best\.pt .* here\): choose"),
        ({"dtype": "float32"}, "dtype is float16 there and float32 here"),
        ({"index_width": 4}, "index_width is 0 there and 4 here"),
        ({"name_by": "name"}, r"pattern is img_emb_\{\}\.npy there and img_emb_\{name\}\.npy here"),
    ):
        with refused(reason):
            compute_embeddings(replace(config, **changed), ALONE)
    os.remove(tmp_path / "out" / "img_emb" / "embeddings.json")
    with refused("holds embeddings without a record"):
        compute_embeddings(config, ALONE)


def test_shards_of_one_number_are_named_in_full(config, tmp_path):
    write_shard(tmp_path / "shards", "more-00000", ["0001"])
    with refused(r"would share the embeddings .*img_emb_00000\.npy: set name_by name"):
        compute_embeddings(config, ALONE)
    compute_embeddings(replace(config, name_by="name"), ALONE)
    names = [f"img_emb_{name}.npy" for name in (*COUNTS, "more-00000")]
    assert sorted(os.listdir(tmp_path / "out" / "img_emb")) == ["embeddings.json", *names]


def test_storage_that_does_not_answer_is_no_missing_embedding(config, monkeypatch):
    fetch = Collection.fetch

    def away(collection, shard, member, kinds=None):
        raw = fetch(collection, shard, member, kinds)
        return replace(raw, problem=Unavailable("away")) if member == 1 else raw

    monkeypatch.setattr(Collection, "fetch", away)
    with pytest.raises(storage.UnavailableError, match="away"):
        compute_embeddings(config, ALONE)


def test_values_that_are_not_finite_are_refused(config, monkeypatch):
    monkeypatch.setattr(Clip, "encode_images", lambda clip, images: torch.full((len(images), 16), 1e6))
    with refused(r"image embedding of .*00000\.tar : 00000000 has values .* in float16: set"):
        compute_embeddings(config, ALONE)
    compute_embeddings(replace(config, dtype="float32", out_dir=f"{config.out_dir}2"), ALONE)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"data_dir": ()}, "data_dir is not set"),
        ({"clip_path": ""}, "clip_path is not set"),
        ({"out_dir": ""}, "out_dir is not set"),
        ({"what": ()}, "what is none"),
        ({"what": ("image", "image")}, "what is 'image,image', but must name each"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"index_width": -1}, "index_width is -1"),
        ({"caption_field": "json"}, "caption_field is 'json'"),
        ({"what": ("text",), "caption_field": "json:caption"}, "holds no captions .* set caption_field"),
    ],
)
def test_impossible_settings_are_refused(config, changed, reason):
    with refused(reason):
        compute_embeddings(replace(config, **changed), ALONE)
