"""Files on their way to a service that is slow, away or broken."""

import os
import threading

import pytest
from refusing import refused

from diff_dalle.config import InputError
from diff_dalle.storage import retries
from diff_dalle.tracking.stores import WAITING, Uploads

pytestmark = pytest.mark.usefixtures("fast_retries")


class Service:
    """Keeps what it is sent. open: whether it answers; error: with which it fails."""

    def __init__(self):
        self.files, self.open, self.error, self.asked = {}, threading.Event(), None, threading.Event()
        self.open.set()

    def put(self, path, name):
        self.asked.set()
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        with open(path, "rb") as file:
            self.files[name] = file.read()


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def uploads(tmp_path, service):
    return Uploads(str(tmp_path), service.put, "the service")


@pytest.fixture
def silent(uploads, service):
    """The service, which does not answer while it is sent the file "a" with "0"."""
    service.open.clear()
    uploads.add("a", write(b"0"))
    assert service.asked.wait(20)
    return service


def write(data):
    return lambda file: file.write(data)


def left(folder):
    return sorted(name for _, _, names in os.walk(folder) for name in names)


def finish(uploads):
    notes = []
    uploads.finish(notes.append)
    return notes


def answered(silent, uploads):
    """The service, after it has answered, and another one that got all later files."""
    uploads.put = (later := Service()).put
    silent.open.set()
    finish(uploads)
    return silent.files, later.files


def test_what_an_earlier_session_has_left_is_sent_at_once(tmp_path, service):
    (tmp_path / "waiting").mkdir()
    (tmp_path / "waiting" / "a").write_bytes(b"one")
    uploads = Uploads(str(tmp_path), service.put, "the service")
    assert service.asked.wait(20)
    finish(uploads)
    assert service.files == {"a": b"one"}


def test_files_arrive_and_leave_nothing_behind(tmp_path, service, uploads):
    uploads.add("a/b.pth", write(b"one"))
    uploads.add("c.pth", write(b"two"))
    notes = finish(uploads)
    assert service.files == {"a/b.pth": b"one", "c.pth": b"two"} and not left(tmp_path)
    assert {"Saved a/b.pth to the service", "Saved c.pth to the service"} <= set(notes)


def test_nothing_waits_for_a_service(tmp_path, silent, uploads):
    """While it is silent, files can be added, and a newer one takes the place of an older that waits."""
    for data in (b"1", b"2", b"3"):
        uploads.add("a", write(data))
    assert uploads.collect() == [] and left(tmp_path) == ["a", "a"]
    assert answered(silent, uploads) == ({"a": b"0"}, {"a": b"3"})


def test_a_failed_file_gives_way_to_a_newer_one(tmp_path, silent, uploads):
    """A newer file was added while the older one failed."""
    silent.error = RuntimeError("odd")
    uploads.add("a", write(b"new"))
    assert answered(silent, uploads) == ({}, {"a": b"new"}) and not left(tmp_path)


def test_a_bounded_number_of_files_waits(tmp_path, silent, uploads):
    for number in range(1, WAITING + 3):
        uploads.add(f"{number}.pth", write(b"x"))
    kept = [f"{number}.pth" for number in range(3, WAITING + 3)]
    assert left(tmp_path) == [*kept, "a"]
    assert [text.split()[0] for text in uploads.collect()] == ["1.pth", "2.pth"]
    assert answered(silent, uploads) == ({"a": b"0"}, dict.fromkeys(kept, b"x"))


def test_a_temporary_failure_is_repeated(service, uploads):
    attempts = []

    def put(path, name):
        attempts.append(name)
        if len(attempts) < 4:
            raise ConnectionError("away")

    uploads.put = put
    uploads.add("a.pth", write(b"1"))
    assert finish(uploads)[-1] == "Saved a.pth to the service" and len(attempts) == 4


@pytest.mark.parametrize(
    "error", [ConnectionError("gone away"), PermissionError("no"), RuntimeError("odd"), KeyError()]
)
def test_a_lasting_failure_is_reported_and_tried_again_by_the_next_session(
    tmp_path, service, uploads, error, monkeypatch
):
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.2)
    service.error = error
    uploads.add("a.pth", write(b"1"))
    notes = finish(uploads)
    assert any("a.pth was not saved to the service, and waits for the next attempt" in note for note in notes)
    assert notes[-1] == "a.pth: not saved to the service; the next session of this run will try again"
    assert left(tmp_path) == ["a.pth"]
    service.error = None
    finish(Uploads(str(tmp_path), service.put, "the service"))
    assert service.files == {"a.pth": b"1"} and not left(tmp_path)


def test_what_a_killed_session_was_sending_is_sent_unless_a_newer_one_waits(tmp_path, service):
    for folder, name, data in (("sending", "a", b"1"), ("sending", "b", b"old"), ("waiting", "b", b"new")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(data)
    finish(Uploads(str(tmp_path), service.put, "the service"))
    assert service.files == {"a": b"1", "b": b"new"}


def test_a_session_that_must_end_at_once_does_not_wait(silent, uploads, monkeypatch):
    monkeypatch.setattr("diff_dalle.tracking.stores.HURRY_SECONDS", 0.05)
    uploads.hurry()
    assert finish(uploads) == ["a: not saved to the service; the next session of this run will try again"]
    silent.open.set()


def test_repeated_attempts_end_when_the_session_must(service, uploads, monkeypatch):
    monkeypatch.setattr(retries, "RETRY_SECONDS", 1000.0)
    monkeypatch.setattr("diff_dalle.tracking.stores.HURRY_SECONDS", 20.0)
    service.error = ConnectionError("away")
    uploads.add("a", write(b"1"))
    assert service.asked.wait(20)
    uploads.hurry()
    assert "a was not saved to the service" in finish(uploads)[0] and not uploads._thread.is_alive()


def test_a_file_that_cannot_be_written_is_not_sent(tmp_path, service, uploads):
    def fail(file):
        file.write(b"half")
        raise InputError("the disk is full")

    with refused("full"):
        uploads.add("a", fail)
    finish(uploads)
    assert service.files == {} and not left(tmp_path)
