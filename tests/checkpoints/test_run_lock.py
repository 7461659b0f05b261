"""One run at a time in a log directory: on this machine, on others, after a kill."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusing import refused

from diff_dalle import storage
from diff_dalle.checkpoints import run_lock
from diff_dalle.checkpoints.run_lock import RunLock, hold

ROOT = str(Path(__file__).parent.parent.parent)
HOLDER = """
import sys, time
from diff_dalle.checkpoints.run_lock import hold
import os
with hold(sys.argv[1]):
    child = os.fork()  # as a data worker, which outlives a killed process for a while
    if child:
        print("held", child, flush=True)
    time.sleep(60)
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX locks")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Ten beats in the time after which a holder is taken for dead."""
    for name, value in {"BEAT": 0.05, "STALE": 0.5, "POLL": 0.02, "SETTLE": 0.02}.items():
        monkeypatch.setattr(run_lock, f"{name}_SECONDS", value)


def content(folder):
    return json.loads((folder / "run.lock").read_text() or "{}")


def write(folder, **held):
    (folder / "run.lock").write_text(json.dumps(held))


def assert_held(folder):
    """By this process, as soon as it asks."""
    with hold(str(folder)):
        assert content(folder)["pid"] == os.getpid()


def assert_refused(folder, words):
    with refused(words), hold(str(folder)):
        pytest.fail("entered")


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder, and the id of its child."""
    env = {**os.environ, "PYTHONPATH": ROOT}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    child = int(process.stdout.readline().split()[1])
    yield process, child
    process.kill()
    process.wait()
    os.kill(child, signal.SIGKILL)


@needs_fork
def test_a_second_run_is_refused_and_the_first_one_named(tmp_path, other):
    since = content(tmp_path)["since"]
    words = f"is in use by process {other[0].pid} on {socket.gethostname()} since {since}"
    assert_refused(tmp_path, words)
    assert content(tmp_path)["pid"] == other[0].pid


@needs_fork
def test_after_a_kill_the_next_run_starts_at_once(tmp_path, other, monkeypatch):
    """Although the holder has not released the folder, and its workers still live."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1e9)
    other[0].kill()
    other[0].wait()
    os.kill(other[1], 0)
    assert_held(tmp_path)


def test_the_folder_is_free_after_the_block_and_after_an_error(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(RuntimeError), hold(str(tmp_path)):
            assert content(tmp_path)["pid"] == os.getpid()
            raise RuntimeError
        assert content(tmp_path) == {}


def test_an_error_before_anything_else_is_written_leaves_no_trace(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "new/one"):
        with pytest.raises(RuntimeError), hold(str(tmp_path / folder)):
            raise RuntimeError
    assert [*tmp_path.rglob("*")] == [tmp_path / "empty"]
    with hold(str(tmp_path / "new/one")):
        pass
    assert content(tmp_path / "new/one") == {}


@needs_fork
def test_a_lock_that_a_holder_removed_in_the_meantime_is_made_again(tmp_path, monkeypatch):
    lock, take = run_lock._lock, [lambda: (tmp_path / "run.lock").unlink()]
    monkeypatch.setattr(run_lock, "_lock", lambda descriptor: (take.pop()() if take else None, lock(descriptor))[1])
    with hold(str(tmp_path)):
        assert content(tmp_path)["pid"] == os.getpid()


@needs_fork
def test_a_folder_that_was_removed_in_the_meantime_is_made_again(tmp_path, monkeypatch):
    make, take = storage.make_dirs, [lambda: (tmp_path / "run").rmdir()]
    monkeypatch.setattr(storage, "make_dirs", lambda folder: (make(folder), take.pop()() if take else None))
    with hold(str(tmp_path / "run")):
        assert content(tmp_path / "run")["pid"] == os.getpid() and not take


@needs_fork
def test_a_removed_file_is_noticed(tmp_path):
    """The next run holds another file of that name."""
    with hold(str(tmp_path)) as lock:
        (tmp_path / "run.lock").unlink()
        with refused(r"run\.lock was removed, which marks .* as in use: leave it there"):
            lock.check()
        write(tmp_path, **FOREIGN)
        with refused(r"run\.lock was removed"):
            lock.check()
    assert content(tmp_path) == FOREIGN


@needs_fork
@pytest.mark.parametrize(
    ("meanwhile", "words"),
    [
        (lambda folder: write(folder, **FOREIGN), "is in use by process 7 on elsewhere"),
        (lambda folder: (folder / "run.lock").unlink(), r"run\.lock was removed"),
    ],
)
def test_without_locks_the_last_of_two_that_start_together_has_the_folder(tmp_path, monkeypatch, meanwhile, words):
    """The other one has looked before the file was written, or removes it as it leaves no trace."""
    monkeypatch.setattr(run_lock, "_lock", lambda descriptor: False)
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: meanwhile(tmp_path))
    assert_refused(tmp_path, words)


COMPETITOR = """
import contextlib, os, sys
from diff_dalle.checkpoints.run_lock import hold
from diff_dalle.config import InputError
folder, log = sys.argv[1:3]
log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for i in range(100):
    try:
        with hold(folder) as lock:
            os.write(log, b"in ")
            if i % 3:
                open(os.path.join(folder, "checkpoint"), "w").close()
            lock.check()
            os.write(log, b"out ")
            if i % 3 == 0:
                raise EOFError  # leaves no trace, unless the other one has left something
    except EOFError:
        pass
    except InputError as error:
        assert "is in use by process" in str(error), error
    if i % 5 == 0:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, "checkpoint"))
"""


@needs_fork
def test_of_two_that_compete_one_at_a_time_has_the_folder(tmp_path):
    """Two hundred starts, some of which make the folder and remove it again."""
    arguments = [sys.executable, "-c", COMPETITOR, str(tmp_path / "new" / "run"), str(tmp_path / "log")]
    both = [subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": ROOT}) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    words = (tmp_path / "log").read_text().split()
    assert words == ["in", "out"] * (len(words) // 2) and len(words) > 100


def test_the_lock_beats(tmp_path):
    with hold(str(tmp_path)) as lock:
        first = content(tmp_path)["beat"]
        deadline = time.monotonic() + 30
        while content(tmp_path)["beat"] == first and time.monotonic() < deadline:
            time.sleep(0.01)
        assert content(tmp_path)["beat"] > first
        lock.check()


def beating(folder, held, **last):
    """Called instead of sleep: writes a beat each time, and ``last`` from the fifth on."""
    count = [0]

    def sleep(seconds):
        count[0] += 1
        write(folder, **({**held, "beat": count[0]} if count[0] < 5 or not last else last))

    return sleep


FOREIGN = {"host": "elsewhere", "pid": 7, "token": "other", "since": "noon"}


def test_a_holder_elsewhere_that_beats_is_respected(tmp_path, monkeypatch, capsys):
    write(tmp_path, **FOREIGN)
    monkeypatch.setattr(run_lock.time, "sleep", beating(tmp_path, FOREIGN))
    assert_refused(tmp_path, "is in use by process 7 on elsewhere since noon")
    assert "waiting up to" in capsys.readouterr().out and content(tmp_path)["token"] == "other"


def test_a_holder_elsewhere_that_is_silent_is_taken_for_dead(tmp_path):
    write(tmp_path, **FOREIGN)
    assert_held(tmp_path)


def test_a_damaged_lock_is_taken_over(tmp_path):
    for text in ("{", "[]", "\x00" * 9):
        (tmp_path / "run.lock").write_text(text)
        assert_held(tmp_path)


def test_whoever_lost_the_folder_notices(tmp_path):
    with hold(str(tmp_path)) as lock:
        write(tmp_path, **FOREIGN)
        with refused("is in use by process 7 on elsewhere"):
            lock.check()
        time.sleep(0.2)
    assert content(tmp_path)["token"] == "other"  # neither a beat nor the release has changed it


@pytest.mark.parametrize(("pid", "alive"), [("own", True), (2**22 + 1, False), (0, False), (-1, False), ("x", False)])
def test_without_locks_the_process_id_decides(tmp_path, monkeypatch, pid, alive):
    """As on file systems that have none."""
    monkeypatch.setattr(run_lock, "_lock", lambda descriptor: False)
    write(tmp_path, host=socket.gethostname(), pid=os.getpid() if pid == "own" else pid, token="other")
    if alive:
        assert_refused(tmp_path, "is in use by process")
    else:
        assert_held(tmp_path)


@pytest.fixture
def bucket(monkeypatch):
    """An object store: whole files, by name."""
    files = {}
    monkeypatch.setattr(storage, "exists", lambda path: path in files)
    monkeypatch.setattr(storage, "read_bytes", lambda path, offset=0, size=None: files[path])
    monkeypatch.setattr(storage, "write_bytes", files.__setitem__)
    monkeypatch.setattr(storage, "make_dirs", lambda folder: None)
    return files


def test_object_stores_are_locked_by_content(bucket):
    with hold("s3://bucket/run"):
        held = json.loads(bucket["s3://bucket/run/run.lock"])
        assert held["pid"] == os.getpid()
        assert_refused("s3://bucket/run", f"is in use by process {os.getpid()}")
    assert bucket["s3://bucket/run/run.lock"] == b""


def test_of_two_that_start_together_in_an_object_store_the_last_writer_wins(bucket, monkeypatch):
    monkeypatch.setattr(
        run_lock.time, "sleep", lambda _: bucket.update({"s3://b/run/run.lock": json.dumps(FOREIGN).encode()})
    )
    assert_refused("s3://b/run", "is in use by process 7 on elsewhere")


def test_what_cannot_be_a_lock_file_is_one_sentence(tmp_path):
    (tmp_path / "run.lock").mkdir()
    with refused(r"run\.lock is a folder"):
        RunLock(str(tmp_path)).acquire()
