"""One run at a time in a log directory.

The file ``run.lock`` names the process that trains, and the process rewrites it every BEAT_SECONDS. On a local disk it
also holds a lock of the operating system, which ends with the process, however that ends, and which network file
systems extend to other machines where they can. Where they cannot, and in object stores, a holder on another machine is
judged by its beats: after STALE_SECONDS without one it is taken for dead. Two runs that start there within
SETTLE_SECONDS of each other are told apart by who wrote last.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime

from .. import storage
from ..config import InputError, named

if POSIX := sys.platform != "win32":
    import fcntl

FILE = "run.lock"
BEAT_SECONDS = 20.0
STALE_SECONDS = 90.0  # several beats may be late, on a busy machine or a slow file system
POLL_SECONDS = 1.0
SETTLE_SECONDS = 2.0


class RunLock:
    """This process's hold on a log directory. Made by ``hold``."""

    def __init__(self, folder: str):
        self.folder, self.path = folder, storage.join(folder, FILE)
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        self.owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "token": secrets.token_hex(8)}
        self.beats, self.is_new = 0, False  # whether the local file was not there before
        self.descriptor = -1  # of a local file
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def acquire(self) -> None:
        """InputError when another process holds the folder."""
        exclusive = False
        storage.make_dirs(self.folder)
        if POSIX and not storage.is_remote(self.path):
            self.descriptor = self._open()
            try:
                exclusive = self.descriptor >= 0 and _lock(self.descriptor)
            except BlockingIOError:
                raise self._refusal(self._read()) from None
            if not self._is_at_path():  # a holder that leaves no trace removed it, or the folder, in the meantime
                self._close()
                self.acquire()
                return
        held = self._read()
        if held and not (exclusive and held.get("host") == self.owner["host"]) and self._is_alive(held):
            raise self._refusal(held)
        self._write()
        if not exclusive:
            time.sleep(SETTLE_SECONDS)
            self.check()
        self._beating.start()

    def check(self) -> None:
        """InputError when another process has taken the folder over, for which this one did not seem to live, or when
        somebody removed the lock's file, so that the next run may take the folder over."""
        held = self._read()
        if held.get("token") != self.owner["token"]:
            raise self._refusal(held)
        if self.descriptor >= 0 and not self._is_at_path():
            remedy = f"leave it there while a run is going on, or choose another {named('logdir')}"
            raise InputError(f"{self.path} was removed, which marks {self.folder} as in use: {remedy}")

    def release(self, without_trace: bool = False) -> None:
        """Leave the folder free. without_trace: and without the file, if it was not there before."""
        self._done.set()
        if self._beating.is_alive():
            self._beating.join()
        with contextlib.suppress(InputError, OSError):  # the folder may be gone or full; the run itself has ended well
            if self._read().get("token") == self.owner["token"]:
                self._put(b"")
                if without_trace and self.is_new:
                    storage.remove(self.path)
        self._close()

    def _open(self) -> int:
        """The descriptor of the local file; -1 if the folder was removed in the meantime."""
        with storage.explained(self.path), contextlib.suppress(FileNotFoundError):
            self.is_new = not os.path.exists(self.path)
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        return -1

    def _close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _is_at_path(self) -> bool:
        """Whether the open file is still that of the path."""
        with contextlib.suppress(FileNotFoundError):
            return self.descriptor >= 0 and os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        return False

    def _refusal(self, held: dict) -> InputError:
        holder = f"process {held.get('pid', '?')} on {held.get('host', '?')} since {held.get('since', '?')}"
        remedy = f"wait for its end, or choose another {named('logdir')}"
        return InputError(f"{self.folder} is in use by {holder}: {remedy}")

    def _is_alive(self, held: dict) -> bool:
        """Whether the process that a lock names lives: on this machine, by its id; else, by its next beat."""
        if POSIX and held.get("host") == self.owner["host"]:
            return _runs(held.get("pid"))
        print(
            f"{self.path} names process {held.get('pid', '?')} on {held.get('host', '?')}: waiting up to "
            f"{STALE_SECONDS:.0f} s for a sign of life",
            flush=True,
        )
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            now = self._read()
            if now != held:
                return bool(now)  # it was released in the meantime if empty
        return False

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            with contextlib.suppress(InputError, OSError):  # a disk that is full or away for a while; see STALE_SECONDS
                if self._read().get("token") == self.owner["token"]:
                    self._write()

    def _read(self) -> dict:
        """The content of the lock file; empty when nobody holds it."""
        if self.descriptor >= 0:
            with storage.explained(self.path):
                text = os.pread(self.descriptor, 4096, 0)
        else:
            text = storage.read_bytes(self.path, 0, 4096) if storage.exists(self.path) else b""
        try:
            held = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            return {"damaged": text.hex()}
        return held if isinstance(held, dict) else {"damaged": text.hex()}

    def _write(self) -> None:
        self.beats += 1
        self._put(json.dumps({**self.owner, "beat": self.beats}).encode())

    def _put(self, data: bytes) -> None:
        if self.descriptor < 0:
            storage.write_bytes(self.path, data)
            return
        with storage.explained(self.path):
            os.pwrite(self.descriptor, data, 0)  # in place: a new file of that name would not be locked
            os.ftruncate(self.descriptor, len(data))


def _lock(descriptor: int) -> bool:
    """Take the operating system's lock. False where there is none; BlockingIOError when another process has it.

    A POSIX lock, since it belongs to this process alone: the data workers inherit the other kind, flock, and may
    outlive a killed process by seconds. It is lost when this process closes the file under any descriptor.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, (BlockingIOError, PermissionError)):  # both mean that it is taken
            raise BlockingIOError from None
        return False  # this file system has no locks
    return True


def _runs(pid: object) -> bool:
    """Whether a process of this machine lives."""
    if type(pid) is not int or pid <= 0:  # 0 and below mean groups of processes
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it lives, and is somebody else's
        return True
    return True


@contextlib.contextmanager
def hold(folder: str) -> Iterator[RunLock]:
    """The lock of a log directory for the duration of the block. InputError when another process has it.

    A block that fails before the folder holds anything else leaves neither the lock's file nor the folder, if they
    were not there before.
    """
    missing = _missing_folders(folder)
    lock, done = RunLock(folder), False
    try:
        lock.acquire()
        yield lock
        done = True
    finally:
        lock.release(without_trace=not done and lock.is_new and storage.list_files(folder) == [lock.path])
        if not done:
            for path in missing:
                with contextlib.suppress(OSError):  # it holds something
                    os.rmdir(path)


def _missing_folders(folder: str) -> list[str]:
    """The local folders that are yet to be made for this one, the lowest first."""
    found: list[str] = []
    path = "" if storage.is_remote(folder) else os.path.abspath(storage.local_path(folder))
    while path and not os.path.exists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found
