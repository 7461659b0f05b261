"""``pipe:COMMAND``: the output of a shell command as a read-only file."""

from __future__ import annotations

import io
import subprocess
from typing import BinaryIO, cast

from ..errors import InputError
from .read_only import ReadOnly

CHUNK = 1 << 20


class _PipeOutput(io.RawIOBase):
    """The output of a shell command. Its end raises InputError if the command failed."""

    def __init__(self, path: str):
        self.path = path
        self.process = subprocess.Popen(path.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE)
        self.output = cast(io.BufferedReader, self.process.stdout)  # because of PIPE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self.output.readinto(buffer)
        if count == 0 and self.process.wait() != 0:
            raise InputError(f"{self.path}: the command failed with status {self.process.returncode}")
        return count

    def close(self):
        if not self.closed:
            self.output.close()
            self.process.wait()
        super().close()


class Pipe(ReadOnly):
    def exists(self, path: str) -> bool:
        return True

    def size_and_tag(self, path: str) -> tuple[int, str]:
        return -1, ""

    def open_read(self, path: str) -> BinaryIO:
        return io.BufferedReader(_PipeOutput(path), CHUNK)

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        with self.open_read(path) as stream:
            while offset > 0:
                skipped = len(stream.read(min(offset, CHUNK)))
                if not skipped:
                    break
                offset -= skipped
            return stream.read(-1 if size is None else size)
