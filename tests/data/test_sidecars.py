import os
import re
from dataclasses import replace

import numpy as np
import pytest
from file_server import serving
from refusing import refused
from shard_making import Letters, captions_of, load, make_shards, make_tar, npy_bytes, sample, take

from diff_dalle import storage
from diff_dalle.data.buckets import AspectConfig
from diff_dalle.data.loader import Loader
from diff_dalle.data.shards import ShardFiles
from diff_dalle.data.sidecars import Sidecar, SidecarFiles
from diff_dalle.data.spec import CaptionSpec, EmbeddingSpec, ImageSpec, SampleSpec

WIDTH = 6
COUNTS = [7, 3, 5]


def embedding_of(key: str) -> np.ndarray:
    return np.random.default_rng(int(key)).standard_normal(WIDTH).astype(np.float32)


def rows_of(start: int, count: int, dtype="<f4") -> np.ndarray:
    rows = [embedding_of(str(i)) for i in range(start, start + count)]
    return np.stack(rows).astype(dtype) if rows else np.zeros((0, WIDTH), dtype)


@pytest.fixture
def shards(tmp_path):
    """Shards 00000 to 00002, and the embeddings of their samples beside them."""
    folder = make_shards(tmp_path, COUNTS)
    for shard, count in enumerate(COUNTS):
        rows = rows_of(sum(COUNTS[:shard]), count)
        (tmp_path / f"img_emb_{shard:05d}.npy").write_bytes(npy_bytes(rows))
    return folder


def spec_of(pattern="img_emb_{}.npy", length=0, **options) -> SampleSpec:
    embedding = EmbeddingSpec(WIDTH, Sidecar(pattern, **options), length=length)
    return SampleSpec(
        ImageSpec((8, 8)), (CaptionSpec(Letters(), 20, "text" if length else ""),), embeddings=(embedding,)
    )


def loader(folder, spec, **options) -> Loader:
    return load(folder, spec, **{"shuffle": False, **options})


def assert_aligned(batch):
    """Every embedding is that of the sample with its caption."""
    expected = np.stack([embedding_of(caption[-4:]) for caption in captions_of(batch)])
    np.testing.assert_array_equal(batch.cond.image_embedding.numpy(), expected)


def test_rows_follow_the_samples_through_shuffling(shards):
    for batch in take(loader(shards, spec_of(), num_workers=2, shuffle=True), 0, 8):
        assert_aligned(batch)


def test_rows_count_the_samples_of_the_tar_and_not_the_usable_ones(tmp_path):
    """Sample 1 has no caption; its row must be passed over with it."""
    files = [file for i in range(4) for file in sample(f"{i:04d}", None if i == 1 else f"caption of {i:04d}")]
    make_tar(tmp_path / "0.tar", files)
    (tmp_path / "img_emb_0.npy").write_bytes(npy_bytes(rows_of(0, 4)))
    data = loader(tmp_path, spec_of())
    assert data.samples == 3
    assert_aligned(data.batch_at(range(9)))


def test_keys_can_name_the_rows(tmp_path, caplog):
    """As img2dataset's do: failed downloads leave gaps in the tar, but not in the file of embeddings."""
    keys = ["000420001", "000420005", "000420002"]
    files = [file for key in [*keys, "last", "000420009"] for file in sample(key, f"caption of {key}")]
    make_tar(tmp_path / "00042.tar", files)
    (tmp_path / "emb_0042.npy").write_bytes(npy_bytes(rows_of(0, 6)))
    data = loader(tmp_path, spec_of("emb_{:04d}.npy", index_width=4), streams=1)
    assert data.samples == 5
    assert_aligned(data.batch_at(range(3)))
    assert captions_of(data.batch_at([3])) == ["caption of 000420001"] and (data.broken, data.missing) == (0, 2)
    assert "row 9 of 6" in caplog.text and "row -1 of 6" in caplog.text


def test_only_the_row_is_read(shards, monkeypatch):
    data = loader(shards, replace(spec_of(), image=None))
    reads, read = [], ShardFiles.read
    monkeypatch.setattr(ShardFiles, "read", lambda *call: reads.append(call[1:]) or read(*call))
    data.batch_at(range(8))
    sizes = [size for shard, _, size in reads if shard.path.endswith(".npy")]
    assert sizes == [4 * WIDTH] * 8


def test_embeddings_alone_need_no_member_of_the_tar(shards):
    spec = SampleSpec(embeddings=(EmbeddingSpec(WIDTH, Sidecar("img_emb_{}.npy"), "clip"),))
    data = loader(shards, spec, streams=1)
    batch = data.batch_at(range(15))
    np.testing.assert_array_equal(batch.cond.extra["clip_embedding"].numpy(), rows_of(0, 15))
    assert set(batch.cond.present()) == {"extra.clip_embedding"} and batch.images.shape == (15, 0, 0, 0)


def test_unusable_rows_are_replaced_and_counted(shards, tmp_path, caplog):
    rows = rows_of(0, 7)
    rows[1, 2], rows[3], rows[5, 0] = np.nan, 0, np.inf
    (tmp_path / "img_emb_00000.npy").write_bytes(npy_bytes(rows))
    data = loader(shards, spec_of(), streams=1)
    batch = data.batch_at(range(7))
    assert [caption[-1] for caption in captions_of(batch)] == list("0224466")
    assert (data.broken, data.missing) == (2, 1)
    assert_aligned(batch)
    assert "0001: its embedding has NaN" in caplog.text and "0003: its embedding is all zeros" in caplog.text


def test_a_file_that_changes_in_use_is_no_broken_sample(shards, tmp_path):
    data = loader(shards, spec_of())
    os.truncate(tmp_path / "img_emb_00000.npy", 128 + 2 * 4 * WIDTH + 5)
    with pytest.raises(storage.ChangedError, match=r"img_emb_00000\.npy had 296 bytes when it was indexed"):
        data.batch_at(range(15))


@pytest.mark.parametrize(("ranges", "copy"), [(True, False), (True, True), (False, False)])
def test_tars_and_embeddings_may_be_remote(shards, tmp_path, ranges, copy):
    with serving() as server:
        server.ranges = ranges
        for path in tmp_path.iterdir():
            if path.is_file():
                server.files[f"/data/{path.name}"] = server.files[f"/other/{path.name}"] = path.read_bytes()
        url = server.url("/data/{00000..00002}.tar")
        for source, pattern in (
            (url, "img_emb_{}.npy"),  # beside the shard
            (url, server.url("/other/img_emb_{}.npy")),
            (url, f"{tmp_path}/img_emb_{{}}.npy"),
            (shards, server.url("/other/img_emb_{}.npy")),
            (url, f"pipe:cat {tmp_path}/img_emb_{{}}.npy"),
            (f"expand:pipe:cat {tmp_path}/{{00000..00002}}.tar", f"{tmp_path}/img_emb_{{}}.npy"),
        ):
            data = loader(source, spec_of(pattern), copy_shards=copy, shard_cache=str(tmp_path / "copies"))
            assert_aligned(data.batch_at(range(0, 20, 3)))
            assert data.broken == 0


def test_remote_rows_are_not_fetched_with_their_file(shards, tmp_path):
    with serving() as server:
        rows = np.zeros((100_000, WIDTH), np.float32)
        rows[:7] = rows_of(0, 7)
        server.files["/img_emb_00000.npy"] = npy_bytes(rows)
        source = os.path.join(shards, "00000.tar")
        data = loader(source, spec_of(server.url("/img_emb_{}.npy")))
        server.sent = 0
        assert_aligned(data.batch_at(range(7)))
        assert server.sent == 7 * 4 * WIDTH


@pytest.mark.parametrize(
    ("pattern", "shard", "path"),
    [
        ("img_emb_{}.npy", "/data/00012.tar", "/data/img_emb_00012.npy"),
        ("img_emb_{:04d}.npy", "/data/00012.tar", "/data/img_emb_0012.npy"),
        ("img_emb_{:4}.npy", "/data/00012.tar", "/data/img_emb_0012.npy"),
        ("{name}.npy", "/data/train-a.TAR", "/data/train-a.npy"),
        ("/emb/{name}/x.npy", "/data/train-a.tar", "/emb/train-a/x.npy"),
        ("emb/{}.npy", "/data/part2-00012.tar", "emb/00012.npy"),
        ("s3://bucket/emb/{}.npy", "s3://bucket/data/7.tar", "s3://bucket/emb/7.npy"),
        ("{}.npy", "https://host/data/7.tar?key=9", "https://host/data/7.npy"),
        ("{name}.npy", "a/laion-00012.tar.gz", "a/laion-00012.npy"),
        ("{:03d}.npy", "a/7.tgz", "a/007.npy"),
        ("/e/{}.npy", "pipe:cat 0003.tgz", "/e/0003.npy"),
        ("/emb/{}.npy", "pipe:aws s3 cp s3://2024/00007.tar -", "/emb/00007.npy"),
        ("pipe:s3cmd get s3://b/{}.npy -", "00007.tar", "pipe:s3cmd get s3://b/00007.npy -"),
    ],
)
def test_the_path_follows_from_the_shards(pattern, shard, path):
    assert Sidecar(pattern).path(shard) == path


@pytest.mark.parametrize(
    ("pattern", "shard", "message"),
    [
        ("emb.npy", "", r"pattern of embeddings is 'emb\.npy', but must contain \{\} or \{name\} once"),
        ("{}/{}.npy", "", "must contain"),
        ("{:d}.npy", "", "must contain"),
        ("{}.npy", "/data/train.tar", r"/data/train\.tar has no number in its name"),
        ("{}.npy", "pipe:cat x", "pipe:cat x has no number in its name"),
        ("{}.npy", "pipe:cat 1.tar", "pipe:cat 1.tar has no folder for the embeddings 1.npy"),
    ],
)
def test_patterns_that_give_no_path_are_refused(pattern, shard, message):
    with refused(message):
        Sidecar(pattern).path(shard)


STATES = np.ones((3, 4, WIDTH), "<f4")


@pytest.mark.parametrize(
    ("data", "length", "message"),
    [
        (npy_bytes(rows_of(0, 2)), 0, r"img_emb_00001\.npy has 2 embeddings, but .*00001\.tar has 3 samples"),
        (npy_bytes(rows_of(0, 3)[:, :5]), 0, r"holds float32 \[3, 5\], but must hold floating-point .*\[rows, 6\]"),
        (npy_bytes(rows_of(0, 1)[0]), 0, r"holds float32 \[6\]"),
        (npy_bytes(np.ones((3, 6), np.int32)), 0, r"holds int32 \[3, 6\]"),
        (npy_bytes(np.full((3, 6), "x", object)), 0, r"holds object \[3, 6\]"),
        (npy_bytes(np.asfortranarray(rows_of(0, 3))), 0, "is in Fortran order"),
        (npy_bytes(rows_of(0, 3))[:-1], 0, r"is truncated: 3 embeddings do not fit in its 199 bytes"),
        (b"", 0, r"img_emb_00001\.npy cannot be read: not a \.npy file"),
        (npy_bytes(STATES), 0, r"holds float32 \[3, 4, 6\], but must hold .*\[rows, 6\]"),
        (npy_bytes(STATES[:, 0]), 4, r"holds float32 \[3, 6\], but .*token states .*\[rows, tokens, 6\]"),
        (npy_bytes(STATES[..., :5]), 4, r"holds float32 \[3, 4, 5\]"),
        (npy_bytes(STATES[:, :0]), 4, r"holds float32 \[3, 0, 6\]"),
        (npy_bytes(STATES)[:-1], 2, "is truncated"),
    ],
)
def test_files_that_do_not_fit_their_shards_are_refused_at_the_start(shards, tmp_path, data, length, message):
    (tmp_path / "img_emb_00001.npy").write_bytes(data)
    with refused(message):
        loader(tmp_path / "00001.tar", spec_of(length=length))


def test_shards_without_their_file_are_left_out_and_named(shards, tmp_path, caplog):
    """clip-retrieval may have skipped one. Without any, there is nothing to train on."""
    (tmp_path / "img_emb_00001.npy").unlink()
    data = loader(shards, spec_of(), streams=1)
    assert (data.samples, data.collection.left_out) == (12, 3)
    assert_aligned(data.batch_at(range(12)))
    assert re.search(r"3 samples left out: without embeddings; there is no .*img_emb_00001\.npy", caplog.text)
    aspect = loader(shards, spec_of(), batch_size=1, aspect=AspectConfig(("1/1", "2/3")))
    assert aspect.samples == 12 and set(captions_of(aspect.batch_at([0]))) <= set(captions_of(data.batch_at(range(12))))
    for shard in (0, 2):
        (tmp_path / f"img_emb_{shard:05d}.npy").unlink()
    with refused(r"none of the embeddings of 3 shards exists, the first .*img_emb_00000\.npy"):
        loader(shards, spec_of())


def test_samples_without_embeddings_never_end_a_run(tmp_path, caplog):
    make_shards(tmp_path, [300, 300])
    rows = rows_of(0, 300)
    rows[10:290] = 0  # more than could be broken one after the other
    (tmp_path / "img_emb_00000.npy").write_bytes(npy_bytes(rows))
    (tmp_path / "img_emb_00001.npy").write_bytes(npy_bytes(rows_of(300, 300)))
    data = loader(tmp_path, spec_of(), streams=1, max_broken=0.0)
    assert "280 of 600 samples: without an embedding, and skipped: its embedding is all zeros" in caplog.text
    for _ in range(2):
        assert_aligned(data.batch_at(range(0, 300, 7)))
    assert (data.broken, data.missing) == (0, 276) and caplog.text.count("replaced /") == 20
    assert "further samples without embeddings are replaced and counted, but not named" in caplog.text


def test_two_shards_cannot_share_a_file(shards, tmp_path):
    (tmp_path / "more").mkdir()
    make_shards(tmp_path / "more", [3])
    with refused(r"00000\.tar and .*more/00000\.tar would share the embeddings .*00000\.npy"):
        loader(shards, spec_of(f"{tmp_path}/img_emb_{{}}.npy"))


def test_headers_are_read_once(shards, monkeypatch):
    """When the loader is made, and not again by workers or for samples."""
    parsed = []
    original = SidecarFiles._open
    monkeypatch.setattr(SidecarFiles, "_open", lambda self, path: parsed.append(path) or original(self, path))
    data = loader(shards, spec_of())
    assert len(parsed) == 3
    data.batch_at(range(15))
    assert len(parsed) == 3


def test_shards_without_samples_need_no_file(shards, tmp_path):
    make_tar(tmp_path / "00099.tar", [])
    assert_aligned(loader(shards, spec_of()).batch_at(range(15)))
