"""What a look at some samples finds before anything is trained."""

import json

import numpy as np
import pytest
from refusing import refused
from shard_making import (
    Letters,
    captions_of,
    encoded,
    load,
    make_shards,
    make_tar,
    npy_bytes,
    random_image,
    sample,
    tar_bytes,
)

from diff_dalle.config import InputError
from diff_dalle.data import first_look
from diff_dalle.data.inspection import InspectionConfig, inspect_shards
from diff_dalle.data.spec import CaptionSpec, EmbeddingSpec, ImageSpec, SampleSpec

IMAGE = encoded(random_image())
CAPTIONS = SampleSpec(ImageSpec((8, 8)), (CaptionSpec(Letters(), 20),))
EMBEDDINGS = SampleSpec(ImageSpec((8, 8)), embeddings=(EmbeddingSpec(4, "img_emb.npy"),))


def json_shard(path, records):
    files = []
    for number, record in enumerate(records):
        files += [(f"{number}.jpg", IMAGE), (f"{number}.json", json.dumps(record).encode())]
    path.write_bytes(tar_bytes(files))


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("json:capton", "no text under 'capton'; its texts are under caption (4), also (3)"),
        ('["json", "captions"]', "no list of texts under 'captions'; its texts are under caption (4), also (3)"),
    ],
)
def test_a_caption_field_that_no_sample_has_is_refused_at_the_start(tmp_path, field, said):
    records = [{"caption": f"picture {i}", "also": ["a", "b"] if i else [], "width": 24} for i in range(4)]
    json_shard(tmp_path / "0.tar", records)
    with pytest.raises(InputError) as error:
        load(tmp_path, CAPTIONS, caption_field=field)
    assert f"caption_field is {field!r}, but" in str(error.value)
    assert "finds no caption in any of 4 samples of data_dir: its json has" in str(error.value)
    assert said in str(error.value)
    assert captions_of(load(tmp_path, CAPTIONS, caption_field="json:also", streams=1).first(1)) == ["a"]


def test_captions_that_some_samples_lack_are_said(tmp_path, caplog):
    json_shard(tmp_path / "0.tar", [{"text": "a"}, {"text": ""}, {"caption": "b"}])
    found = load(tmp_path, CAPTIONS, caption_field="json:text").findings
    assert found.captions == ["a"] and found.is_complete
    assert "2 of 3 samples: without a readable caption, and skipped: " in caplog.text
    make_tar(tmp_path / "0.tar", [file for i in range(3) for file in sample(str(i), " ")])
    with refused("in any of 3 samples of data_dir: its caption is empty$"):
        load(tmp_path, CAPTIONS)


def test_the_look_is_bounded_and_spread_evenly(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(first_look, "LOOK", 8)
    monkeypatch.setattr(first_look, "SHARDS", 4)
    make_shards(tmp_path, [3, 0, 5, 1, 4, 2, 6, 7, 8])
    data = load(tmp_path, CAPTIONS)
    keys = [int(caption[-4:]) for caption in data.findings.captions]
    assert keys == [0, 1, 8, 13, 14, 21, 24]  # of the shards with 3, 1, 2 and 7 samples
    assert data.findings.looked == len(keys) and not data.findings.is_complete
    assert load(tmp_path, CAPTIONS, seed=5).findings.captions == data.findings.captions
    assert not load(tmp_path, SampleSpec(ImageSpec((8, 8)))).findings.looked
    assert "skipped" not in caplog.text


def test_members_without_embeddings_are_skipped_counted_and_inspected(tmp_path, caplog):
    for shard, rows in enumerate((np.eye(4), np.zeros((2, 4)), None)):
        files = []
        for i in range(4):
            files += [*sample(f"{shard}{i}", "a")]
            if rows is not None and i < len(rows):
                files.append((f"{shard}{i}.img_emb.npy", npy_bytes(rows[i].astype(np.float16))))
        make_tar(tmp_path / f"{shard}.tar", files)
    data = load(tmp_path, EMBEDDINGS, shuffle=False, streams=1, max_broken=0.0)
    batch = data.batch_at(range(12))
    assert batch.cond.image_embedding.any(1).all() and (data.samples, data.broken, data.missing) == (6, 0, 2)
    assert "6 samples left out: without an image or a .img_emb.npy; all those of " in caplog.text
    assert "2.tar" in caplog.text.split("all those of ")[1].splitlines()[0]
    assert "2 of 6 samples: without an embedding, and skipped" in caplog.text

    lines, _ = inspect_shards(InspectionConfig((str(tmp_path),)))
    assert f"no .img_emb.npy in 1 shard: {tmp_path}/2.tar" in lines
    assert "2 of 6 .img_emb.npy looked at are all zeros, the mark of a missing embedding" in lines
    (tmp_path / "0.tar").unlink()
    with refused("none of 2 samples of data_dir has an embedding: its embedding is all zeros"):
        load(tmp_path, EMBEDDINGS)
