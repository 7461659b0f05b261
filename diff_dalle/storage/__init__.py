"""Local and remote files through one set of functions, with atomic writes.

A path is local (also ``file:``), ``s3://`` (boto3, the extra ``s3``), ``gs://`` or ``az://`` (blobfile), ``http(s)://``
(read-only), or ``pipe:COMMAND``, the output of a shell command (read-only, sequential). Failures raise an InputError
that names the path: missing file, no permission, full disk, lost connection.

To add a kind of storage: a class with the methods of ``Local`` in a file of this folder, and a line in ``_BACKENDS``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from ..errors import InputError
from .blob import Blob
from .copies import fetch
from .failures import explained, full_disk, no_space
from .http import Http
from .local import Local
from .paths import is_remote, join, local_path, scheme, split
from .pipe import Pipe
from .s3 import S3

__all__ = [
    "atomic_writer",
    "exists",
    "explained",
    "fetch_to_cache",
    "is_remote",
    "join",
    "list_files",
    "local_path",
    "make_dirs",
    "open_read",
    "read_bytes",
    "read_text",
    "reads_by_offset",
    "remove",
    "scheme",
    "size_and_tag",
    "split",
    "write_bytes",
]

_BACKENDS = {
    "": Local(),
    "http": Http(),
    "https": Http(),
    "pipe": Pipe(),
    "s3": S3(),
    "gs": Blob(),
    "az": Blob(),
}


def _backend(path: str):
    kind = scheme(path)
    if kind not in _BACKENDS:
        raise InputError(
            f"{path}: {kind}:// is not supported: use a local path or {', '.join(filter(None, _BACKENDS))}"
        )
    return _BACKENDS[kind]


def exists(path: str) -> bool:
    with explained(path):
        return _backend(path).exists(path)


def list_files(folder: str, recursive: bool = False) -> list[str]:
    """The files of a folder, sorted, without hidden ones; recursive: including subfolders."""
    with explained(folder):
        found = _backend(folder).list_files(folder, recursive)
        return sorted(path for path in found if not split(path)[1].startswith("."))


def size_and_tag(path: str) -> tuple[int, str]:
    """Size in bytes (-1 = unknown) and a tag that changes with the content: modification time or ETag."""
    with explained(path):
        return _backend(path).size_and_tag(path)


def reads_by_offset(path: str) -> bool:
    """Whether byte ranges of the file can be read without reading everything before them."""
    if scheme(path) in ("http", "https"):
        with explained(path):
            return _backend(path).by_offset(path)
    return scheme(path) != "pipe"


def read_bytes(path: str, offset: int = 0, size: int | None = None) -> bytes:
    """``size`` bytes (None = all) from ``offset``; fewer at the end of the file."""
    with explained(path):
        return _backend(path).read(path, offset, size)


def read_text(path: str) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a UTF-8 text file") from None


def open_read(path: str) -> BinaryIO:
    """A binary stream from the start of the file; the caller closes it."""
    with explained(path):
        return _backend(path).open_read(path)


def make_dirs(folder: str):
    with explained(folder):
        _backend(folder).make_dirs(folder)


def remove(path: str):
    with explained(path):
        _backend(path).remove(path)


@contextlib.contextmanager
def atomic_writer(path: str) -> Iterator[BinaryIO]:
    """A binary file that appears at ``path`` when the block ends without an error, and not at all otherwise.

    It is written to a hidden temporary file in the same folder, flushed to disk and renamed; a remote file is uploaded
    from a local temporary file. After any error the temporary file is removed and an existing file is unchanged.
    """
    backend, remote = _backend(path), is_remote(path)
    target = path if remote else os.path.realpath(local_path(path))  # a symbolic link stays one
    folder, name = (tempfile.gettempdir(), "upload") if remote else os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    with explained(folder):
        file = open(temporary, "xb")  # noqa: SIM115 (closed in finally)
    try:
        yield file
        with explained(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            backend.put(temporary, target)
    except BaseException as error:
        if full_disk(error) and not isinstance(error, InputError):
            raise no_space(path) from error
        raise
    finally:
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            file.close()
        with contextlib.suppress(FileNotFoundError):  # renamed
            os.remove(temporary)


def write_bytes(path: str, data: bytes):
    """Write a whole file atomically, see ``atomic_writer``."""
    with atomic_writer(path) as file:
        file.write(data)


def fetch_to_cache(url: str, cache_dir: str, limit_bytes: int, tag: str = "") -> str:
    """The path of a local copy of ``url`` in ``cache_dir``, downloaded if necessary.

    limit_bytes: maximum size of the folder; the least recently used copies are removed, never the requested one.
    tag:         the version of the file, from ``size_and_tag``.

    Processes may share the folder: one downloads, the others wait. An incomplete download, or one from a command that
    failed, is retried and never kept. Raises InputError after the last attempt.
    """
    make_dirs(cache_dir)
    return fetch(_backend(url), url, local_path(cache_dir), limit_bytes, tag)
