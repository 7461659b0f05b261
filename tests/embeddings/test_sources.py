"""Where embeddings are: folders with and without a record, patterns, members."""

import json
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_making import make_classifier_file
from refusing import refused
from shard_making import make_shards, npy_bytes

from diff_dalle.data.loader import DataConfig, Loader
from diff_dalle.data.sidecars import Sidecar
from diff_dalle.data.spec import EmbeddingSpec, SampleSpec
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.computing import EmbeddingsConfig, compute_embeddings
from diff_dalle.embeddings.sources import FILE, find_embeddings, folder_record

SETTING = "img_embeddings_url"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data set, the embeddings of its pictures and texts, and the identity of their CLIP."""
    folder = tmp_path_factory.mktemp("made")
    clip_path = make_classifier_file(folder, noised=False)
    (folder / "shards").mkdir()
    make_shards(folder / "shards", [3, 2])
    config = EmbeddingsConfig(
        (str(folder / "shards"),), clip_path=clip_path, out_dir=str(folder / "out"), what=("image", "text_states")
    )
    compute_embeddings(config, ALONE)
    return folder, folder_record(str(folder / "out" / "img_emb")).identity


def find(given, width=16, **options):
    return find_embeddings(str(given), width, SETTING, **options)


@pytest.mark.parametrize("given", ["out", "out/", "out/img_emb", "out/img_emb/", "out/img_emb/img_emb_{}.npy"])
def test_a_folder_says_all_about_its_embeddings(made, given):
    folder, identity = made
    found = find(f"{folder}/{given}", identity=identity, index_width=0)
    assert found.spec == EmbeddingSpec(16, Sidecar(f"{folder}/out/img_emb/img_emb_{{}}.npy"))
    assert found.identity == identity and found.origin.endswith("img_emb_{}.npy, by diff_dalle " + f"{folder}/best.pt")
    data = Loader(
        DataConfig(data_dir=(f"{folder}/shards",), num_workers=0), SampleSpec(embeddings=(found.spec,)), shuffle=False
    )
    assert data.batch_at(range(5)).cond.image_embedding.shape == (5, 16)


def test_states_of_texts_are_found_by_their_kind(made):
    folder, _ = made
    found = find(folder / "out", what="text_states", length=9, name="clip")
    sidecar = Sidecar(f"{folder}/out/text_states/text_states_{{}}.npy")
    assert found.spec == EmbeddingSpec(16, sidecar, "clip", 9)


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ("out", {"width": 8}, r"holds embeddings of width 16 \(diff_dalle .*best\.pt\), but 8 is required"),
        (
            "out",
            {"identity": "x:1"},
            r"holds embeddings by .*best\.pt \(diff_dalle:\w+\), but the .* \(x:1\); comp",
        ),
        ("out", {"index_width": 4}, "holds rows with index_width 0, but 4 is set: leave"),
        ("out/text_states", {}, "holds text_states embeddings, but image ones are required .* --what image"),
        ("out", {"what": "text"}, "is no folder of .npy files"),
    ],
)
def test_what_does_not_fit_is_named(made, given, options, reason):
    with refused(f"^{SETTING}: .*{reason}"):
        find(made[0] / given, **options)


@pytest.mark.parametrize("changed", [{"counts": {}}, {"index_width": 3}, {"shape": [77, 16]}])
def test_other_records(tmp_path, made, changed):
    record = json.loads((made[0] / "out" / "img_emb" / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**record, **changed}))
    if "counts" in changed:
        with refused("not finished: run diff-dalle prepare_data embeddings aga"):
            find(tmp_path)
    else:
        assert find(tmp_path).spec.source.index_width == changed.get("index_width", 0)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["img_emb_0000.npy", "img_emb_0001.npy"], "img_emb_{:04d}.npy"),
        (["img_emb_0.npy", "img_emb_11.npy"], "img_emb_{:01d}.npy"),
        (["00000.npy"], "{:05d}.npy"),
        (["laion2b_7.npy", "laion2b_8.npy", "other.txt"], "laion2b_{:01d}.npy"),
    ],
)
def test_folders_from_elsewhere(tmp_path, names, pattern):
    """As clip-retrieval and its reordering tool write them."""
    for name in names:
        (tmp_path / name).write_bytes(npy_bytes(np.ones((2, 16), "<f4")))
    found = find(tmp_path, index_width=4)
    assert found.spec.source == Sidecar(f"{tmp_path}/{pattern}", 4) and found.identity == ""
    assert find(tmp_path).spec.source.index_width == 0 and find(f"{tmp_path}/").origin == f"{tmp_path}/{pattern}"


def test_files_of_two_kinds_need_a_pattern(tmp_path):
    for name in ("img_emb_0.npy", "text_emb_0.npy"):
        (tmp_path / name).write_bytes(npy_bytes(np.ones((2, 16), "<f4")))
    with refused(r"files img_emb_….npy and text_emb_….npy: say which by .*/img_emb_\{\}\.npy"):
        find(tmp_path)
    assert find(f"{tmp_path}/text_emb_{{}}.npy").spec.source.pattern == f"{tmp_path}/text_emb_{{}}.npy"


@pytest.mark.parametrize("given", ["none", "empty"])
def test_a_folder_without_embeddings_says_how_to_make_them(tmp_path, given):
    (tmp_path / "empty").mkdir()
    with refused(rf"compute them by diff-dalle prepare_data .* --out_dir .*{given}$"):
        find(tmp_path / given)


@pytest.mark.parametrize("given", ["npy", ".npy", "img_emb.npy", "IMG_EMB.NPY", ".safetensors"])
def test_members(given):
    found = find(given, length=3)
    assert found.spec == EmbeddingSpec(16, given.lower().lstrip("."), "", 3) and found.identity == ""


def test_a_pattern_may_stand_for_files_beside_the_shards():
    assert find("img_emb_{}.npy", index_width=4).spec.source == Sidecar("img_emb_{}.npy", 4)
    with refused(r"must contain \{\}"):
        find("img_emb_{x}.npy")


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"what": "sound"},
        {"what": 3},
        {"clip": "a\nb"},
        {"shape": []},
        {"shape": [1, 2, 3]},
        {"shape": [1.5]},
        {"shape": 16},
        {"index_width": "4"},
        {"index_width": -1},
        {"pattern": "../img_emb_{}.npy"},
        {"counts": []},
        {"counts": {"samples": "1"}},
        {"missing": None},
        {"more": 1},
    ],
    ids=str,
)
def test_records_that_are_none_are_refused(tmp_path, made, changed):
    record = json.loads((made[0] / "out" / "img_emb" / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**record, **changed}))
    with refused("does not describe embeddings of format 1"):
        folder_record(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "[" * 100_000])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with refused("does not describe embeddings"):
        folder_record(str(tmp_path))


def test_records_name_their_first_difference(made):
    record = folder_record(str(made[0] / "out" / "img_emb"))
    assert record.difference(record) == ""
    assert record.difference(replace(record, counts={}, missing={"a": "b"}, clip="moved")) == ""
    assert record.difference(replace(record, shape=(8,))) == "shape is (16,) there and (8,) here"
