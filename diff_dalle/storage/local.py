"""Local files, and temporary ones that are named after their process, so that those of dead ones can be removed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..config import InputError
from .failures import ChangedError
from .paths import UNKNOWN, FileInfo, State, local_path

TEMPORARY = ".tmp"  # how their names end
OLD_SECONDS = 86_400.0  # a file of another machine, unchanged for so long, is not being written
_NAME = re.compile(r"\..+\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.tmp", re.DOTALL)


@functools.cache
def _place() -> str:
    """Eight digits for what process numbers are unique in: a start of a machine, and a container."""
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]


def temporary_path(folder: str, name: str) -> str:
    """A new hidden path in ``folder`` for what will become the file ``name``."""
    # Many file systems limit a name to 255 bytes.
    short = name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return os.path.join(folder, f".{short}.{_place()}-{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}")


def _is_stale(name: str, age: float) -> bool:
    found = _NAME.fullmatch(name)
    if not found:
        return False
    if age > OLD_SECONDS:
        return True
    return found[1] == _place() and not _is_alive(int(found[2]))


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # there, signal 0 would end the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def sweep(folder: str) -> None:
    """Remove the temporaries in ``folder`` that dead processes left there."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process was faster
                if entry.name.endswith(TEMPORARY) and _is_stale(entry.name, time.time() - entry.stat().st_mtime):
                    os.remove(entry.path)


STANDARD_INPUT = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # where shells put ``<(command)``
log = logging.getLogger(__name__)


def _refuse_special(path: str, mode: int):
    """Raise InputError for what may block or never end."""
    kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    kind = next((kind for test, kind in kinds.items() if test(mode)), "")
    if kind and not path.startswith(STANDARD_INPUT):
        raise InputError(f"{path} is {kind}, not a file: name a regular file, or remove it from the folder")


def open_regular(path: str) -> int:
    """A descriptor to read a local file. Never waits; raises InputError for a FIFO, socket or device."""
    # Windows has no O_NONBLOCK, and would translate line ends without O_BINARY.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    if not path.startswith(STANDARD_INPUT):
        flags |= getattr(os, "O_NONBLOCK", 0)
        _refuse_special(path, os.stat(path).st_mode)  # a socket cannot even be opened
    descriptor = os.open(path, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        _refuse_special(path, mode)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class ReadBySeeking(ABC):
    """Base class of backends whose files can be read at any byte."""

    @abstractmethod
    def open_read(self, path: str, state: State) -> BinaryIO: ...

    def read(self, path: str, offset: int, size: int | None, state: State) -> bytes:
        with self.open_read(path, state) as file:
            if offset:  # the output of a command has no other
                file.seek(offset)
            return file.read(-1 if size is None else size)


class Local(ReadBySeeking):
    def exists(self, path: str) -> bool:
        return os.path.exists(local_path(path))

    def list_files(self, folder: str, recursive: bool) -> Iterator[FileInfo]:
        top, seen = local_path(folder), set[str]()

        def skip(error: OSError):
            if error.filename == top or not isinstance(error, PermissionError):
                raise error
            log.warning("%s cannot be listed and is left out: permission denied", error.filename)  # as lost+found

        for root, folders, names in os.walk(top, followlinks=True, onerror=skip):
            real = os.path.realpath(root)
            if real in seen or (seen and not recursive):  # symbolic links may form cycles
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [name for name in folders if recursive and not name.startswith(".")]
            yield from (FileInfo(os.path.join(root, name)) for name in names)

    def size_and_tag(self, path: str) -> State:
        status = os.stat(local_path(path))
        _refuse_special(local_path(path), status.st_mode)
        return status.st_size, str(status.st_mtime_ns)

    def open_read(self, path: str, state: State) -> BinaryIO:
        file = open(open_regular(local_path(path)), "rb")  # noqa: SIM115 (the caller closes it)
        status = os.fstat(file.fileno())
        if state != UNKNOWN and state != (status.st_size, str(status.st_mtime_ns)):
            file.close()
            raise ChangedError(f"{path} has changed since its size and tag were {state}")
        return file

    def make_dirs(self, folder: str):
        os.makedirs(local_path(folder), exist_ok=True)

    def remove(self, path: str):
        os.remove(local_path(path))

    def put(self, local: str, path: str):
        """Rename a file within its folder, durably: the new name survives a power failure."""
        os.replace(local, path)
        if os.name == "posix":
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
