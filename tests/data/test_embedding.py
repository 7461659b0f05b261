"""Embeddings in members of shards: .npy and safetensors, of pictures and of the tokens of texts."""

import json

import numpy as np
import pytest
import torch
from refusing import refused
from shard_making import Letters, load, make_tar, npy_bytes, sample

from diff_dalle.data.arrays import KINDS, read_embedding
from diff_dalle.data.sidecars import Sidecar
from diff_dalle.data.spec import CaptionSpec, EmbeddingSpec, ImageSpec, SampleSpec
from diff_dalle.images.decode import BrokenSample

WIDTH = 6
TYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8"}
ROWS = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)


def safetensors(*arrays: np.ndarray, padding: int = 0, **changed) -> bytes:
    """A file of these arrays; uint16 ones are bfloat16. changed: of the entry of the first."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for number, array in enumerate(arrays):
        kind = {value: key for key, value in TYPES.items()}.get(array.dtype.str, "BF16")
        span = [len(data), len(data) + array.nbytes]
        header[f"embedding {number}"] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    if arrays:
        header["embedding 0"] |= changed
    text = json.dumps(header).encode() + b" " * padding
    return len(text).to_bytes(8, "little") + text + data


def bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


WRITERS = {"npy": npy_bytes, "safetensors": safetensors}
TRUNCATED = {
    "npy": "its embedding is truncated",
    "safetensors": "its embedding cannot be read: not a safetensors file (Error while deserializing: incomplete "
    "metadata, file not fully covered)",
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("npy", ">f4"), *((kind, dtype) for kind in ("npy", "img_emb.safetensors") for dtype in ("<f2", "<f4", "<f8"))],
)
@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH)])
def test_an_embedding_of_any_float_type(kind, dtype, shape):
    data = WRITERS[kind.rpartition(".")[2]](ROWS[0].astype(dtype).reshape(shape))
    found = read_embedding(kind, data, (WIDTH,))
    assert found.dtype == np.float32 and found.shape == (WIDTH,)
    np.testing.assert_array_equal(found, ROWS[0].astype(dtype).astype(np.float32))


def test_safetensors_in_bfloat16():
    found = read_embedding("safetensors", safetensors(bfloat16(ROWS[0]), padding=9), (WIDTH,))
    np.testing.assert_array_equal(found, torch.from_numpy(ROWS[0]).bfloat16().float().numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_tokens_are_cut_and_padded(kind):
    data, all_in_one = WRITERS[kind](ROWS), WRITERS[kind](ROWS[None])
    np.testing.assert_array_equal(read_embedding(kind, data, (3, WIDTH)), ROWS)
    np.testing.assert_array_equal(read_embedding(kind, data, (2, WIDTH)), ROWS[:2])
    padded = read_embedding(kind, all_in_one, (5, WIDTH))
    np.testing.assert_array_equal(padded, np.concatenate([ROWS, np.zeros((2, WIDTH))]))
    one = read_embedding(kind, WRITERS[kind](ROWS[:1]), (2, WIDTH))
    np.testing.assert_array_equal(one, np.stack([ROWS[0], np.zeros(WIDTH)]))


def test_states_in_fortran_order():
    np.testing.assert_array_equal(read_embedding("npy", npy_bytes(np.asfortranarray(ROWS)), (3, WIDTH)), ROWS)


def test_what_is_no_usable_embedding_is_broken():
    def reason(kind, data, shape=(WIDTH,)):
        with pytest.raises(BrokenSample) as caught:
            read_embedding(kind, data, shape)
        return str(caught.value)

    for kind, write in WRITERS.items():
        assert reason(kind, write(ROWS)) == "its embedding is float32 [3, 6], but must be floating-point [6]"
        assert "floating-point [tokens, 6]" in reason(kind, write(ROWS[0]), (3, WIDTH))
        assert "floating-point [tokens, 6]" in reason(kind, write(ROWS[:, :5]), (3, WIDTH))
        assert "floating-point [tokens, 6]" in reason(kind, write(ROWS[:0]), (3, WIDTH))
        assert reason(kind, write(ROWS[0])[:-1]) == TRUNCATED[kind]
        assert " [6], but must be" in reason(kind, write(np.ones(WIDTH, np.int64))) or kind == "safetensors"
        assert "all zeros" in reason(kind, write(np.zeros(WIDTH, np.float32)))
        assert "all zeros" in reason(kind, write(ROWS * [[0], [1], [1]]), (3, WIDTH))
        assert "NaN" in reason(kind, write(ROWS[0] * np.nan))
        assert "NaN" in reason(kind, write(ROWS * [[1], [1], [np.inf]]), (3, WIDTH))
        assert "infinite" in reason(kind, write(np.full(WIDTH, 1e300)))
        assert "not a " in reason(kind, b"") and "not a " in reason(kind, ROWS.tobytes())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *(
            (data, "(not )?a safetensors file")
            for data in (
                b"\2" + bytes(7) + b"{}",
                (2**63).to_bytes(8, "little") + b"{}" * 9,
                (9).to_bytes(8, "little") + b'{"a": 1}',
                b"\x09" + bytes(7) + b"[1, 2, 3]" + bytes(24),
                b"\x09" + bytes(7) + b"\xff" * 9,
                (60_000).to_bytes(8, "little") + b"[" * 60_000,
                *(safetensors(ROWS[0], shape=shape) for shape in ([WIDTH, -1], [6.0], 6, [10**19], [7])),
                *(
                    safetensors(ROWS[0], data_offsets=offsets)
                    for offsets in ([24, 0], [0], None, [10**17, 10**17 + 4 * WIDTH])
                ),
                safetensors(ROWS[0], dtype=["F32"]),
                safetensors(ROWS[0]) + b"more",
            )
        ),
        (safetensors(), "a safetensors file of 0 tensors, not of one"),
        (safetensors(ROWS[0], ROWS[1]), "a safetensors file of 2 tensors, not of one"),
        (safetensors(ROWS[0].astype("<i8")), "a safetensors file of I64"),
    ],
    ids=range(20),
)
def test_other_safetensors_are_refused(data, reason):
    with pytest.raises(BrokenSample, match=f"its embedding cannot be read: {reason}"):
        read_embedding("safetensors", data, (WIDTH,))


def test_many_dimensions_are_refused():
    with pytest.raises(BrokenSample, match=r"float32 \[1, 1, "):
        read_embedding("safetensors", safetensors(ROWS[0], shape=[1] * 70 + [6]), (WIDTH,))


# -------------------------------------------------------------------------------------------------------- in batches


def batch_of(folder, *embeddings):
    spec = SampleSpec(ImageSpec((8, 8)), embeddings=embeddings)
    return load(folder, spec, streams=1, shuffle=False).batch_at(range(3))


def states(count: int) -> np.ndarray:
    """The states of ``count`` tokens."""
    return np.random.default_rng(count).standard_normal((count, WIDTH)).astype(np.float32)


def test_members_fill_a_batch(tmp_path):
    files = []
    for i in range(3):
        members = {"img_emb.safetensors": safetensors(ROWS[i]), "text.npy": npy_bytes(states(i + 1))}
        files += sample(f"{i:04d}") + [(f"{i:04d}.{kind}", data) for kind, data in members.items()]
    make_tar(tmp_path / "0.tar", files)
    cond = batch_of(
        tmp_path,
        EmbeddingSpec(WIDTH, "img_emb.safetensors"),
        EmbeddingSpec(WIDTH, "TEXT.npy", length=2),
        EmbeddingSpec(WIDTH, "text.npy", "long", length=4),
    ).cond
    np.testing.assert_array_equal(cond.image_embedding, ROWS)
    assert cond.mask.tolist() == [[True, False], [True, True], [True, True]] and cond.text_states.shape == (3, 2, 6)
    np.testing.assert_array_equal(cond.text_states[2], states(3)[:2])
    assert cond.extra["long_mask"].sum(1).tolist() == [1, 2, 3]
    np.testing.assert_array_equal(cond.extra["long_states"][1, :2], states(2))


@pytest.mark.parametrize("dtype, length", [("<f2", 2), (">f8", 4), ("<f4", 7)])
def test_sidecars_hold_states_of_tokens(tmp_path, dtype, length):
    make_tar(tmp_path / "0.tar", [file for i in range(3) for file in sample(f"{i:04d}")])
    stored = np.zeros((3, 4, WIDTH), dtype)
    for i in range(3):
        stored[i, : i + 1] = states(i + 1)
    (tmp_path / "text_0.npy").write_bytes(npy_bytes(stored))
    cond = batch_of(tmp_path, EmbeddingSpec(WIDTH, Sidecar("text_{}.npy"), length=length)).cond
    assert cond.text_states.shape == (3, length, WIDTH) and cond.mask.sum(1).tolist() == [1, 2, min(3, length)]
    np.testing.assert_array_equal(cond.text_states[:, :4], stored[:, :length].astype(np.float32))


@pytest.mark.parametrize("source", ["", ".npy", "a/b.npy", "jpg", "emb", "npy.gz"])
def test_members_must_be_of_a_known_kind(source):
    with refused("must be the extension of a member, such as npy"):
        EmbeddingSpec(WIDTH, source)


def test_lengths_are_not_negative_and_other_names_are_free():
    with refused("its length -1"):
        EmbeddingSpec(WIDTH, "npy", length=-1)
    shown = CaptionSpec(Letters(), 3, "shown")
    assert SampleSpec(captions=(shown,), embeddings=(EmbeddingSpec(WIDTH, "npy", length=3),)).read_captions == (shown,)
