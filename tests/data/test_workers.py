"""Waiting for worker processes: it can be interrupted, always ends, and says who is to blame."""

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from multiprocessing import active_children

import pytest
from refusing import refused
from shard_making import Letters, load, make_shards

from diff_dalle.data import workers
from diff_dalle.data.loader import CHUNK, MANY, Loader
from diff_dalle.data.spec import CaptionSpec, SampleSpec

POSIX = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")


class Asleep(Letters):
    """Never returns, like a read from a disk that does not answer; SIGTERM and SIGALRM do not end it."""

    def __call__(self, texts, length):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGALRM})
        while True:
            time.sleep(60)


def loader(folder, tokenize=None, **options) -> Loader:
    spec = SampleSpec(captions=(CaptionSpec(tokenize or Letters(), 20),))
    return load(folder, spec, **{"num_workers": 2, "prefetch": 2, **options})


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path, [7, 5])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(workers, "LEAVE_SECONDS", 0.5)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.05)


@contextlib.contextmanager
def new_processes():
    """The worker processes that are started in the block; all have ended after it."""
    before, found = set(active_children()), []
    yield lambda: found.extend(set(active_children()) - before - set(found)) or found
    assert found and not any(process.is_alive() for process in found)


@POSIX
@pytest.mark.parametrize("received", [0, 3])
def test_a_stopped_worker_is_named_and_ended(shards, received):
    """Also when it had chunks on their way, which only it can hand over."""
    with new_processes() as started:
        batches = loader(shards, data_timeout=1).batches(0)
        for _ in range(1 + received):
            next(batches)
        for process in started():
            os.kill(process.pid, signal.SIGSTOP)
        pids = "|".join(str(process.pid) for process in started())
        with refused(rf"data worker with process number ({pids}) has delivered nothing for 1 s"):
            for _ in range(100):
                next(batches)


@POSIX
def test_a_worker_whose_storage_does_not_answer_is_named_and_ended(shards):
    with new_processes() as started:
        batches = loader(shards, Asleep(), data_timeout=1).batches(0)
        threading.Timer(0.3, started).start()
        with refused("has delivered nothing for 1 s: it is stopped, or its storage does not"):
            next(batches)


@pytest.fixture
def limits(monkeypatch):
    """The soft and hard limits of open files that this process seems to have."""
    found = [1024, 4096]
    monkeypatch.setattr(workers.resource, "getrlimit", lambda which: tuple(found))
    monkeypatch.setattr(workers.resource, "setrlimit", lambda which, pair: found.__setitem__(slice(None), pair))
    return found


@POSIX
def test_the_limit_of_open_files_is_raised_as_far_as_workers_need_and_may(limits):
    workers._allow_open_files(300)
    assert limits == [1024, 4096]
    workers._allow_open_files(2000)
    assert limits == [2000, 4096]
    with refused("at most 4096 open files .* need 5000"):
        workers._allow_open_files(5000)
    limits[:] = [resource.RLIM_INFINITY] * 2
    workers._allow_open_files(10**6)
    assert limits == [resource.RLIM_INFINITY] * 2


def test_chunks_that_cannot_be_received_for_want_of_open_files_are_explained():
    errors = OSError(errno.EMFILE, "Too many open files"), RuntimeError("received 0 items of ancdata")
    for error in (*errors, RuntimeError("Too many open files. Communication with the workers is no longer possible.")):
        assert "too many open files" in str(workers._files_used_up(error))
    assert workers._files_used_up(OSError(errno.EIO, "other")) is None


@POSIX
def test_a_wait_for_workers_ends_when_the_run_is_to_stop(shards):
    asked = []

    def should_stop() -> bool:
        asked.append(started())
        return len(asked) == 3

    with new_processes() as started:
        batches = loader(shards, Asleep(), data_timeout=10).batches(0, should_stop)
        assert next(batches, None) is None
        assert len(asked) == 3 and next(batches, None) is None


@POSIX
def test_a_signal_reaches_the_thread_that_waits(shards):
    """A handler of Python's runs between two instructions, so the wait must not be one long instruction."""
    received = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: received.append(len(received)))
    try:
        with new_processes() as started:
            batches = loader(shards, Asleep(), data_timeout=10).batches(0, lambda: bool(started() and received))
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert next(batches, None) is None
    finally:
        signal.signal(signal.SIGUSR1, previous)


@POSIX
def test_a_worker_that_dies_disturbs_nothing_until_its_chunk_is_needed(shards):
    """Not a checkpoint that is being written, for one."""
    with new_processes() as started:
        batches = loader(shards).batches(0)
        next(batches)
        handler = signal.getsignal(signal.SIGCHLD)
        for process in started():
            process.kill()
            process.join()
        time.sleep(0.05)  # in which a handler of DataLoader's would raise its error
        assert signal.getsignal(signal.SIGCHLD) == handler == signal.SIG_DFL
        pids = "|".join(str(process.pid) for process in started())
        with refused(rf"a data worker died: .*({pids}).*num_workers"):
            for _ in range(100):
                next(batches)


def test_without_workers_the_run_stops_between_chunks(shards):
    answers = iter([False, True])
    batches = loader(shards, num_workers=0).batches(0, lambda: next(answers))
    assert len(next(batches)) == 4 and next(batches, None) is None


def test_a_batch_is_whole_or_absent(shards):
    """Of several chunks, when the run is to stop between them."""
    answers = iter([False, True])
    data = loader(shards, num_workers=0, batch_size=2 * CHUNK)
    assert next(data.batches(0, lambda: next(answers)), None) is None


def test_blocks_of_any_positions_are_the_same_with_workers(shards):
    blocks = [range(3), [5, 1, 1], range(2 * CHUNK + 1), [0], range(90, 100)]
    here = loader(shards, num_workers=0)
    with new_processes() as started:
        there = loader(shards).batches_at(blocks)
        first = next(there)
        started()
        found = [first, *there]
    assert len(found) == len(blocks)
    for block, batch in zip(blocks, found, strict=True):
        assert batch.index.tolist() == list(block)
        assert batch.cond.tokens.equal(here.batch_at(list(block)).cond.tokens)


def test_many_samples_at_once_are_prepared_by_workers(shards):
    data = loader(shards)
    few = data.batch_at(range(MANY))
    with new_processes() as started, _Watch(started):
        many = data.batch_at(range(MANY + 1))
    assert many.cond.tokens[:-1].equal(few.cond.tokens) and many.index.tolist() == list(range(MANY + 1))


class _Watch(threading.Thread):
    """Looks for new processes while the block runs."""

    def __init__(self, look):
        super().__init__(daemon=True)
        self.look, self.over = look, threading.Event()

    def run(self):
        while not self.over.wait(0.005):
            self.look()

    def __enter__(self):
        self.start()

    def __exit__(self, *_):
        self.over.set()
        self.join()


def test_a_worker_reports_errors_of_its_threads_unless_it_was_cut_off(capsys):
    for error in (BrokenPipeError("nobody receives"), KeyError("a bug")):
        workers._report_unless_cut_off(type(error), error, None)
    said = capsys.readouterr().err
    assert "a bug" in said and "nobody receives" not in said
