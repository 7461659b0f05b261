"""``pipe:COMMAND``: the output of a shell command as a read-only file."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
import time
from typing import BinaryIO, cast

from .failures import FailedCommandError, UnavailableError
from .paths import UNKNOWN, State
from .remote import ReadOnly

CHUNK = 1 << 20
SILENT_SECONDS = 300.0  # without a byte, after which a command is killed; it may fetch a file from a slow archive


class _PipeOutput(io.RawIOBase):
    """The output of a shell command. Its end raises UnavailableError if the command failed or was silent for too long.

    The command leads a process group of its own, so that all its processes can be ended.
    """

    def __init__(self, path: str):
        self.path, self.silent = path, False
        self.process = subprocess.Popen(
            path.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE, start_new_session=os.name == "posix"
        )
        self.output = cast(io.BufferedReader, self.process.stdout)  # because of PIPE
        self.waiting_since: float | None = None  # while somebody waits for output
        self.done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while not self.done.wait(min(1.0, SILENT_SECONDS / 4)):
            since = self.waiting_since
            if since is not None and time.monotonic() - since > SILENT_SECONDS:
                self.silent = True
                self._kill()
                return

    def _kill(self):
        """End all processes of the command, unless it has ended and its number may be another's by now."""
        if self.process.returncode is not None:
            return
        if os.name == "posix":
            with contextlib.suppress(ProcessLookupError, PermissionError):  # only dead ones are left
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self.waiting_since = time.monotonic()
        data = self.output.read1(len(buffer))
        if not data:
            self.process.wait()
        self.waiting_since = None
        if self.silent:
            raise UnavailableError(f"{self.path}: the command was killed after {SILENT_SECONDS:g} s without a byte")
        if not data and self.process.returncode:
            raise FailedCommandError(f"{self.path}: the command failed with status {self.process.returncode}")
        buffer[: len(data)] = data
        return len(data)

    def close(self):
        if not self.closed:
            self.done.set()
            self._kill()  # nobody reads the rest
            self.output.close()
            self.process.wait()
        super().close()


class Pipe(ReadOnly):
    def exists(self, path: str) -> bool:
        return True

    def size_and_tag(self, path: str) -> State:
        return UNKNOWN

    def open_read(self, path: str, state: State) -> BinaryIO:
        return io.BufferedReader(_PipeOutput(path), CHUNK)

    def read(self, path: str, offset: int, size: int | None, state: State) -> bytes:
        with self.open_read(path, state) as stream:
            while offset > 0:
                skipped = len(stream.read(min(offset, CHUNK)))
                if not skipped:
                    break
                offset -= skipped
            return stream.read(-1 if size is None else size)
