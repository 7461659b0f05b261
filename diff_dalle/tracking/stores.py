"""Places for files: the local disk, and services, which may be slow or away: training waits for none.

A file for a service is first written into a local folder, which takes as long as a checkpoint does, since the
checkpoint's own files may be gone before they are sent; then a thread sends it. The folder is the queue: what a killed
session left there is sent by the next one. A newer file takes the place of one of the same name that still waits, and
the latest WAITING are kept, so that the disk holds a bounded number of them while a service is away.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

from .. import storage
from ..config import Fault, InputError, named, quantity
from ..storage import retries
from ..storage.failures import is_temporary, reason_of
from ..storage.hub import hub_api, server
from .tracker import import_extra

Write = Callable[[BinaryIO], object]  # of one file's content


class Store:
    """A place for files.

    remote: a service, whose failures are reported and never end a run.
    """

    remote = False
    place = ""  # what to call it in messages

    def add(self, name: str, write: Write) -> None:
        """Keep the file that ``write`` writes under ``name``, in place of an earlier one."""
        raise NotImplementedError

    def collect(self) -> list[str]:
        """What there is to report since the last call. Called after every update, so it must be cheap."""
        return []

    def hurry(self) -> None:
        """``finish`` must not wait."""

    def finish(self, note: Callable[[str], object]) -> None:
        """No call follows. ``note`` reports."""


class LocalStore(Store):
    """Files by their paths, relative to the working directory; also those of the storage that ``storage`` knows."""

    def add(self, name: str, write: Write) -> None:
        if folder := storage.split(name)[0]:
            storage.make_dirs(folder)
        with storage.atomic_writer(name) as file:
            write(file)


MAX_TOKEN = 4096  # bytes of a file with a token
_REPO = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


def check_repo(repo: str) -> None:
    """InputError unless ``repo`` can be the name of a repository."""
    if not _REPO.fullmatch(repo) or len(repo) > 96:
        raise InputError(Fault("huggingface_repo", "must be the name of a repository, such as user/name", repo))


class Hub:
    """A repository, private when it is made here. HF_ENDPOINT selects another server.

    token_path: a file with a token; None = the one that ``hf auth login`` or HF_TOKEN has set.

    Raises InputError when the hub refuses; while it is away, it is asked again by each ``put``.
    """

    def __init__(self, repo: str, token_path: str | None):
        self.repo, self.made = repo, False
        hub = import_extra("huggingface_hub", "hub", "save_to huggingface")
        import_extra("huggingface_hub.utils", "hub", "save_to huggingface").disable_progress_bars()
        token = storage.read_text(token_path, MAX_TOKEN).strip() if token_path else hub.get_token()
        if not token:
            remedy = f"run `hf auth login`, or name a file with a token by {named('token_path')}"
            raise InputError(Fault("huggingface_repo", f"{repo} needs a login: {remedy}"))
        self.server, self.token = server(), token
        try:
            self._make()
        except Exception as error:
            if not is_temporary(error):
                remedy = "check its name, and that the token may write there"
                rule = f"{repo} cannot be used ({reason_of(error)}): {remedy}"
                raise InputError(Fault("huggingface_repo", rule)) from error

    def _make(self) -> Any:
        """The client, with which the repository has been made."""
        api = hub_api(self.token)
        if not self.made:
            api.create_repo(self.repo, private=True, exist_ok=True)
            self.made = True
        return api

    def put(self, path: str, name: str) -> None:
        """Commit the local file ``path`` as ``name``."""
        self._make().upload_file(
            path_or_fileobj=path, path_in_repo=name, repo_id=self.repo, commit_message=f"diff_dalle: {name}"
        )


WAITING = 4
BYTES_PER_SECOND = 2**20  # of the slowest connection for whose end a session waits
HURRY_SECONDS = 5.0  # that a session which was told to end at once waits


class Uploads(Store):
    """folder: local; where files are written, wait and are sent from.
    put:    ``put(path, name)`` sends one file; temporary failures are repeated as those of all remote storage.
    place:  what to call the service in messages, such as ``the Hugging Face repository me/it``.
    server: its address, for the memory of ``storage.retries`` of which servers are away.
    """

    remote = True

    def __init__(self, folder: str, put: Callable[[str, str], object], place: str, server: str = ""):
        self.put, self.place, self.server = put, place, server or place
        self.written, self.waiting, self.sending = (os.path.join(folder, n) for n in ("written", "waiting", "sending"))
        self.messages: deque[str] = deque()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._closing, self._stopping = threading.Event(), threading.Event()
        for name in _names(self.sending):
            self._return(name)
        self._thread = threading.Thread(target=self._work, daemon=True)
        if _names(self.waiting):
            self._start()

    def add(self, name: str, write: Write) -> None:
        """Queue a file. InputError when it cannot be written, as on a full disk."""
        path = os.path.join(self.written, name)
        storage.make_dirs(os.path.dirname(path))
        with storage.atomic_writer(path) as file:
            write(file)
        with self._lock:
            self._move(name, self.written, self.waiting)
            for old in _names(self.waiting)[:-WAITING]:
                os.remove(os.path.join(self.waiting, old))
                self.messages.append(f"{old} was not saved to {self.place}, which has been away for too long")
        self._start()

    def hurry(self) -> None:
        """Let ``finish`` wait only for a moment, and end repeated attempts."""
        self._stopping.set()

    def finish(self, note: Callable[[str], object]) -> None:
        """Send what waits, for a bounded time. What cannot be sent stays in the folder for the next session."""
        if self._thread.is_alive():
            left = [os.path.join(folder, name) for folder in (self.waiting, self.sending) for name in _names(folder)]
            total = sum(_size(path) for path in left)
            limit = retries.RETRY_SECONDS + retries.SILENT_SECONDS + total / BYTES_PER_SECOND
            if left and not self._stopping.is_set():
                note(
                    f"Sending {quantity(len(left), 'file')} ({total:,} bytes) to {self.place}, for up to {limit:.0f} s"
                )
            self._closing.set()
            self._wake.set()
            self._wait(limit)
            self._stopping.set()
        for text in self.collect():
            note(text)
        unsent = [*_names(self.sending), *_names(self.waiting)]
        if unsent:
            note(f"{', '.join(unsent)}: not saved to {self.place}; the next session of this run will try again")

    def collect(self) -> list[str]:
        """What has been reported since the last call."""
        return [self.messages.popleft() for _ in range(len(self.messages))]

    def _start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()
        self._wake.set()

    def _wait(self, limit: float) -> None:
        """Until the thread ends, or ``limit`` seconds; HURRY_SECONDS from when there is no time."""
        end = time.monotonic() + limit
        while self._thread.is_alive() and time.monotonic() < end:
            if self._stopping.is_set():
                end = min(end, time.monotonic() + HURRY_SECONDS)
                self._thread.join(max(0.0, end - time.monotonic()))
                return
            self._thread.join(0.1)

    # ---------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        with retries.stopped_by(self._stopping):
            while True:
                self._wake.wait()
                self._wake.clear()
                last = self._closing.is_set()
                for name in _names(self.waiting):
                    self._send(name)
                if last:
                    return

    def _send(self, name: str) -> None:
        """Send one file, and say so; after a failure it waits for the next call."""
        path = os.path.join(self.sending, name)
        with self._lock:
            try:
                self._move(name, self.waiting, self.sending)  # a newer one may take its place now
            except FileNotFoundError:  # removed in the meantime
                return
        try:
            with storage.explained(self.place):
                retries.retry(self.server, lambda: self.put(path, name))
        except Exception as error:  # no error of a service's client may end a run of weeks
            reason = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            self.messages.append(f"{name} was not saved to {self.place}, and waits for the next attempt: {reason}")
            with self._lock:
                self._return(name)
            return
        os.remove(path)
        self.messages.append(f"Saved {name} to {self.place}")

    def _return(self, name: str) -> None:
        """Let a file that was not sent wait again, unless a newer one waits already."""
        if os.path.exists(os.path.join(self.waiting, name)):
            os.remove(os.path.join(self.sending, name))
        else:
            self._move(name, self.sending, self.waiting)

    @staticmethod
    def _move(name: str, source: str, target: str) -> None:
        path = os.path.join(target, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(os.path.join(source, name), path)


def _names(folder: str) -> list[str]:
    """The files of a folder and its subfolders, relative to it, oldest first."""
    found = []
    for root, _, names in os.walk(folder):
        for path in (os.path.join(root, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                found.append((os.stat(path).st_mtime_ns, os.path.relpath(path, folder).replace(os.sep, "/")))
    return [name for _, name in sorted(found)]


def _size(path: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.path.getsize(path)
    return 0
