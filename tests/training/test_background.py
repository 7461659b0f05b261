"""Calls in a thread, and copies of states."""

import io
import threading

import pytest
import torch

from diff_dalle.training.saving import Background, Snapshot


def fail(text):
    def call():
        raise RuntimeError(text)

    return call


def test_calls_run_in_order_in_another_thread():
    background, done = Background(), []
    for number in range(5):
        background.start(lambda number=number: done.append((number, threading.get_ident())))
    background.wait()
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in {thread for _, thread in done}


def test_a_failure_is_raised_once_and_not_lost_meanwhile():
    background, done = Background(), []
    background.start(fail("first"))
    background.start(lambda: done.append("second"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="first"):
            background.join()
    assert done == ["second"]
    background.start(lambda: done.append("third"))
    with pytest.raises(RuntimeError, match="first"):
        background.check()
    background.check()
    background.wait()
    assert done == ["second", "third"]


def test_a_call_that_is_still_running_is_no_failure():
    background, go = Background(), threading.Event()
    background.start(lambda: go.wait(60))
    background.check()
    go.set()
    background.wait()


def test_a_snapshot_is_left_alone_by_later_changes():
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"w": weight, "lists": [weight[0], 1, "text"], "none": None}
    copy = Snapshot(1).of(state)
    weight.add_(1)
    state["lists"][1] = 2
    assert torch.equal(copy["w"], weight - 1) and torch.equal(copy["lists"][0], weight[0] - 1)
    assert copy["lists"][1:] == [1, "text"] and copy["none"] is None


def test_a_snapshot_is_written_as_the_original_is():
    """Bit for bit: with its layout, and what shares memory once."""

    def written(state):
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    images = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    table = torch.rand(5, 7)
    state = {
        "images": images, "table": table, "tied": table.detach(), "column": table[:, 2], "empty": torch.empty(0),
        "half": table.half(), "count": torch.tensor(3), "parameter": torch.nn.Parameter(table).data,
    }  # fmt: skip
    snapshot = Snapshot(1)
    copy = snapshot.of(state)
    assert written(copy) == written(state)
    assert copy["images"].stride() == images.stride() and copy["column"].stride() == (7,)
    assert snapshot.of({"again": table})["again"].data_ptr() == copy["tied"].data_ptr() != table.data_ptr()
