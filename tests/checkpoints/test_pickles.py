"""Pickles of torch files: the work that they ask for is counted before any of it is done."""

import collections
import io
import pickle
import re
import zipfile

import pytest
import torch
from refusing import damaged

from diff_dalle.checkpoints import content as checks
from diff_dalle.checkpoints.checkpoint import load_file
from diff_dalle.checkpoints.content import MAX_NAME, MAX_OPERATIONS, MAX_TENSORS, DamagedError, operations

HEADER = {"format": 1, "role": "model", "kind": "toy", "step": 4, "samples": 32, "tokenizer": None, "config": {}}
LONG = (1,) * 100_000


class Shaped:
    """Pickled as a tensor of a shape, of which nobody asks whether it is possible."""

    def __init__(self, shape):
        self.shape = shape

    def __reduce__(self):
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.zeros(1).untyped_storage(), dtype=torch.float32, _internal=True
        )
        strides = self.shape if self.shape is LONG else (0,) * len(self.shape)
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, strides, False, collections.OrderedDict())


def saved(path, state, **options):
    torch.save({**HEADER, "state": state}, path, **options)
    return str(path)


def work(*made):
    return operations(io.BytesIO(b"".join(pickle.dumps(each, protocol=2) for each in made)), len(made))


def test_operations_are_counted():
    assert work(None) == 3 and work(None, None) == 6  # protocol, value, stop
    assert work([1, 2, 3]) == 9  # and the list, its place in the memo, a mark, a call for all items


@pytest.mark.parametrize("make", [tuple, list, dict.fromkeys, lambda items: [[[*items]], []]])
def test_what_functions_are_given_counts_each_time(make):
    """In whatever it is wrapped, and wherever in the pickle it was made."""

    class Made:
        def __reduce__(self):
            return set, (arguments,)

    short, long = (make(range(n)) for n in (10, 1010))
    arguments = short
    few = work([Made() for _ in range(20)])
    arguments = long
    assert 20 * 1000 < work([Made() for _ in range(20)]) - few < 20 * 2000 + 6000


def test_operations_without_a_value_hide_no_arguments():
    """Anywhere in a pickle its protocol may be said again."""
    plain = b"\x80\x02cbuiltins\nset\n(" + b"K\x01" * 1000 + b"t"
    hidden = b"\x85\x80\x02R."  # ((…),)
    assert operations(io.BytesIO(plain + hidden)) > 2000


@pytest.mark.parametrize("old", [False, True])
def test_long_shapes_of_many_tensors_are_refused_before_any_is_made(tmp_path, monkeypatch, old):
    path = saved(tmp_path / "a.pt", {str(i): Shaped(LONG) for i in range(30)}, _use_new_zipfile_serialization=not old)
    assert (tmp_path / "a.pt").stat().st_size < 2**20
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was run"))
    with damaged(f"needs more than {MAX_OPERATIONS:,} operations"):
        load_file(path)


def test_no_more_operations_are_looked_at_than_may_be_done():
    class Endless(io.BytesIO):
        count = 0

        def read(self, size=-1):
            self.count += 1
            return b"N" if self.count > 2 else super().read(size)

    endless = Endless(b"\x80\x02")
    assert operations(endless) == MAX_OPERATIONS + 1 and endless.count <= MAX_OPERATIONS + 3


def test_a_pickle_in_capitals_is_looked_at(tmp_path, monkeypatch):
    """torch finds an entry's name in any case."""
    saved(tmp_path / "a.pt", {})
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name.replace("data.pkl", "DATA.pkl"), old.read(name))
        new.writestr("other/data.pkl", old.read("a/data.pkl"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was run"))
    with damaged("is not a PyTorch file"):
        load_file(str(tmp_path / "b.pt"))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (LONG, "its state holds a torch.float32 tensor with 100,000 dimensions"),
        ((1,) * 9, "with 9 dimensions"),
        ((2**47, 0), re.escape("of shape (140737488355328, 0)")),
        ((0, 2**47, 2**47), "no tensor of plain values"),
        ((2**47, 2**47, 0), "is truncated or is not a PyTorch file"),
    ],
)
def test_shapes_that_no_weight_has_are_one_sentence(tmp_path, shape, words):
    path = saved(tmp_path / "a.pt", {"a": Shaped(shape)})
    with pytest.raises(DamagedError, match=words) as error:
        load_file(path)
    assert len(str(error.value)) < 300


def test_tensors_and_the_characters_of_their_names_are_limited(tmp_path, monkeypatch):
    same = torch.zeros(0)
    path = saved(tmp_path / "a.pt", {"n" * (MAX_NAME + 1): same})
    with pytest.raises(DamagedError, match="whose name has more than 500 characters") as error:
        load_file(path)
    assert len(str(error.value)) < 300
    path = saved(tmp_path / "b.pt", {str(i): same for i in range(MAX_TENSORS + 1)})
    with damaged("it has 20,001 tensors, more than 20,000"):
        load_file(path)
    monkeypatch.setattr(checks, "MAX_TENSORS", 30_000)
    assert len(load_file(path)["state"]) == MAX_TENSORS + 1
