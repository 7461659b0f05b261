import itertools
import multiprocessing
import threading
import time

import pytest
from file_server import unused_port

from diff_dalle import storage
from diff_dalle.storage import retries


def test_results_come_in_order_from_at_most_so_many_threads(monkeypatch):
    monkeypatch.setattr(retries, "THREADS", 4)
    running, most, lock = [0], [0], threading.Lock()

    def call(item):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01 * (item % 3))
        with lock:
            running[0] -= 1
        return item * item

    assert list(storage.in_parallel(call, range(20))) == [i * i for i in range(20)]
    assert 2 <= most[0] <= 4 and list(storage.in_parallel(call, [])) == []


@pytest.mark.parametrize("end", ["error", "interrupt"])
def test_nothing_waits_for_a_server_that_is_away(monkeypatch, end):
    """Neither the iteration nor, in the end, the threads; what has not begun does not begin."""
    monkeypatch.setattr(retries, "RETRY_SECONDS", 1e6)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 1e6)
    monkeypatch.setattr(retries, "FIRST_PAUSE", 1e5)
    monkeypatch.setattr(retries, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(retries, "THREADS", 4)
    url, begun, before = f"http://127.0.0.1:{unused_port()}/a", [], set(threading.enumerate())

    def call(item):
        begun.append(item)
        if item == 0:
            if end == "error":
                raise storage.ChangedError("another file")
            return item
        return storage.read_bytes(url)

    results = storage.in_parallel(call, range(100))
    if end == "error":
        with pytest.raises(storage.ChangedError, match="another"):
            next(results)
    else:
        next(results)
        results.close()  # as an exception in the thread that iterates does
    for thread in set(threading.enumerate()) - before:
        assert thread.daemon
        thread.join(20)
        assert not thread.is_alive()
    assert len(begun) < 20


def test_retries_end_with_the_process_that_started_this_one(monkeypatch):
    class Gone:
        def is_alive(self):
            return False

    monkeypatch.setattr(retries, "RETRY_SECONDS", 1e6)
    monkeypatch.setattr(multiprocessing, "parent_process", Gone)
    with pytest.raises(storage.UnavailableError, match="tried once"):
        storage.read_bytes(f"http://127.0.0.1:{unused_port()}/a")


def test_the_pauses_between_attempts_grow_at_random_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 20.0)
    tops = [max(retries._jitter(attempt) for _ in range(200)) for attempt in (1, 2, 3, 50)]
    for top, limit in zip(tops, (0.5, 1.0, 2.0, 20.0), strict=True):
        assert 0.9 * limit < top <= limit
    assert min(retries._jitter(50) for _ in range(200)) < 2.0
    assert all(a < b for a, b in itertools.pairwise(tops))
