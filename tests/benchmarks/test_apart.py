"""Calls in a process of its own: the process stays while all goes well, and is replaced where not."""

import math
import os
import time

import pytest

from benchmarks.apart import Apart


@pytest.fixture
def apart():
    apart = Apart()
    yield apart
    apart.close()


def test_calls_have_one_process_until_one_fails(apart):
    first = apart.call(60, os.getpid)
    assert first not in (os.getpid(), None) and apart.call(60, os.getpid) == first
    with pytest.raises(RuntimeError, match=r"^ValueError: (expected a nonnegative input|math domain error)"):
        apart.call(60, math.sqrt, -1)
    second = apart.call(60, os.getpid)
    assert second != first
    with pytest.raises(ChildProcessError, match="the process ended with status 7"):
        apart.call(60, os._exit, 7)
    third = apart.call(60, os.getpid)
    assert third not in (first, second)
    with pytest.raises(TimeoutError, match="took more than 0 s"):
        apart.call(0.2, time.sleep, 600)
    with pytest.raises(ProcessLookupError):
        os.kill(third, 0)  # it has been waited for
    assert apart.call(60, math.sqrt, 4) == 2
