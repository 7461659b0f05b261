"""Temporary files that are named after their process, so that those of dead ones can be removed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket
import time
from pathlib import Path

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
        return True
    return True


def sweep(folder: str) -> None:
    """Remove the temporaries in ``folder`` that dead processes left there."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process was faster
                if entry.name.endswith(TEMPORARY) and _is_stale(entry.name, time.time() - entry.stat().st_mtime):
                    os.remove(entry.path)
