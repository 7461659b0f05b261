"""Local and remote files through one set of functions, with atomic writes.

A path is local (also ``file:``), ``s3://`` (boto3, the extra ``s3``), ``gs://`` or ``az://`` (blobfile), ``hf://``
(huggingface_hub, the extra ``hub``), ``http(s)://`` (read-only), or ``pipe:COMMAND``, the output of a shell command
(read-only, sequential). Failures raise an InputError that names the path: missing file, no permission, full disk. While
a server is away, calls are repeated for ``retries.RETRY_SECONDS`` and then raise UnavailableError; a silent one counts
as away.

To add a kind of storage: a class with the methods of ``Local`` in a file of this folder, and a line in ``_BACKENDS``.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeVar

from ..config import InputError
from .copies import GZIP, chunks, fetch, mark_used
from .failures import ChangedError, FailedCommandError, UnavailableError, explained, full_disk, is_missing, no_space
from .http import Http
from .hub import Hub
from .local import Local, open_regular, sweep, temporary_path
from .objects import S3, Blob
from .paths import UNKNOWN, FileInfo, State, is_remote, join, local_path, scheme, split, stays_inside
from .pipe import Pipe
from .retries import in_parallel, retry

__all__ = [
    "GZIP",
    "ChangedError",
    "FailedCommandError",
    "FileInfo",
    "State",
    "UnavailableError",
    "append_text",
    "atomic_writer",
    "chunks",
    "decode_text",
    "exists",
    "explained",
    "fetch_to_cache",
    "in_parallel",
    "is_missing",
    "is_remote",
    "join",
    "list_files",
    "local_path",
    "make_dirs",
    "mark_used",
    "open_read",
    "open_regular",
    "read_bytes",
    "read_lines",
    "read_text",
    "reads_by_offset",
    "remove",
    "remove_folder",
    "scheme",
    "size_and_tag",
    "split",
    "stays_inside",
    "write_bytes",
]

Result = TypeVar("Result")
_BACKENDS = {
    "": Local(),
    "http": Http(),
    "https": Http(),
    "hf": Hub(),
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


def _repeated(path: str, call: Callable[[], Result]) -> Result:
    """``call()`` on ``path``, repeated while a server is away, with errors that name the path."""
    with explained(path):
        return retry(path, call)


def exists(path: str) -> bool:
    return _repeated(path, lambda: _backend(path).exists(path))


# What listings of object stores said about their files: when, size and tag.
_listed: dict[str, tuple[float, State]] = {}
LISTED_SECONDS = 60.0


def list_files(folder: str, recursive: bool = False) -> list[str]:
    """The files of a folder, sorted, without hidden ones; recursive: including subfolders.

    Subfolders that cannot be read are left out and named in the log.
    """
    found = _repeated(folder, lambda: list(_backend(folder).list_files(folder, recursive)))
    now = time.monotonic()
    for path in [path for path, (since, _) in _listed.items() if now - since > LISTED_SECONDS]:
        _listed.pop(path, None)  # another thread may have been faster
    _listed.update((info.path, (now, (info.size, info.tag))) for info in found if info.size >= 0)
    return sorted(info.path for info in found if not split(info.path)[1].startswith("."))


def size_and_tag(path: str, listed: bool = False) -> State:
    """Size in bytes (-1 = unknown) and a tag that changes with the content: modification time or ETag.

    listed: accept what a listing of this process said in the last LISTED_SECONDS: no request for each of many shards.

    Raises InputError for a FIFO, socket or device.
    """
    since, state = _listed.get(path, (0.0, UNKNOWN))
    if listed and state != UNKNOWN and time.monotonic() - since <= LISTED_SECONDS:
        return state
    return _repeated(path, lambda: _backend(path).size_and_tag(path))


def reads_by_offset(path: str) -> bool:
    """Whether byte ranges of the file can be read without reading everything before them."""
    if scheme(path) in ("http", "https"):
        return _repeated(path, lambda: _backend(path).by_offset(path))
    return scheme(path) != "pipe"


def read_bytes(path: str, offset: int = 0, size: int | None = None, state: State = UNKNOWN) -> bytes:
    """``size`` bytes (None = all) from ``offset``; fewer at the end of the file.

    state: the file's ``size_and_tag`` when it was indexed.

    Raises ChangedError when the file has another state or is gone, UnavailableError when its server is away for
    longer than ``retries.RETRY_SECONDS``, InputError for any other failure.
    """
    with explained(path):
        try:
            return _backend(path).read(path, offset, size, state)
        except Exception as error:
            if state != UNKNOWN and is_missing(error):
                raise ChangedError(f"{path} was removed while it was in use") from error
            raise


# UTF-32 first: its little-endian mark begins with that of UTF-16.
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode_text(data: bytes, errors: str = "strict") -> str:
    """Bytes → text, without its byte order mark: UTF-8, or what the mark says (The Unicode Standard 16.0, section 23.8,
    table 23-7). errors: what ``bytes.decode`` does with other bytes.

    Raises UnicodeDecodeError, a ValueError, for bytes in any other encoding: which one is never guessed.
    """
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    return data.decode(encoding, errors)


def read_text(path: str, limit: int | None = None) -> str:
    """A text file, as ``decode_text`` reads it. InputError for another encoding, and for more than ``limit`` bytes, of
    which no more are read."""
    data = read_bytes(path) if limit is None else read_bytes(path, 0, limit + 1)
    if limit is not None and len(data) > limit:
        raise InputError(f"{path} has more than {limit:,} bytes")
    try:
        return decode_text(data)
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a UTF-8 text file: save it as UTF-8") from None


def read_lines(path: str) -> list[str]:
    """The complete lines of a text file, with their line ends; none if the file does not exist.

    An incomplete last line, written during a crash, is left out.
    """
    text = read_text(path) if exists(path) else ""
    return text[: text.rfind("\n") + 1].splitlines(keepends=True)


def open_read(path: str) -> BinaryIO:
    """A binary stream from the start of the file; the caller closes it."""
    with explained(path):
        return _backend(path).open_read(path, UNKNOWN)


def make_dirs(folder: str):
    _repeated(folder, lambda: _backend(folder).make_dirs(folder))


def remove(path: str):
    _repeated(path, lambda: _backend(path).remove(path))


def remove_folder(folder: str):
    """Remove a folder with all its files, if it exists."""
    if is_remote(folder):
        for path in list_files(folder, recursive=True):
            remove(path)
    elif exists(folder):
        with explained(folder):
            shutil.rmtree(local_path(folder))


_swept: set[str] = set()  # folders where this process looked for temporaries of dead ones


@contextlib.contextmanager
def atomic_writer(path: str) -> Iterator[BinaryIO]:
    """A binary file that appears at ``path`` when the block ends without an error, and not at all otherwise.

    It is written to a hidden temporary file in the same folder, flushed to disk and renamed; a remote file is uploaded
    from a local temporary file. After any error the temporary file is removed and an existing file is unchanged; those
    that a killed process left in the folder are removed by the next one that writes there.
    """
    backend, remote = _backend(path), is_remote(path)
    target = path if remote else os.path.realpath(local_path(path))  # a symbolic link stays one
    folder, name = (tempfile.gettempdir(), "upload") if remote else os.path.split(target)
    if folder not in _swept:
        _swept.add(folder)
        sweep(folder)
    temporary = temporary_path(folder, name)
    with explained(folder):
        file = open(temporary, "xb")  # noqa: SIM115 (closed in finally)
    try:
        yield file
        with explained(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            retry(path, lambda: backend.put(temporary, target))
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


def append_text(path: str, text: str):
    """Append to a text file; a remote file is rewritten, since object stores cannot append."""
    if is_remote(path):
        write_bytes(path, ("".join(read_lines(path)) + text).encode("utf-8"))
        return
    with explained(path), open(local_path(path), "a", encoding="utf-8", newline="") as file:
        file.write(text)


def fetch_to_cache(url: str, cache_dir: str, limit_bytes: int, tag: str = "") -> str:
    """The path of a local copy of ``url`` in ``cache_dir``, downloaded if necessary, and unpacked if it is gzipped.

    limit_bytes: maximum size of the folder; the least recently used copies are removed, never the requested one. A
                 copy that is kept open takes space after its removal: open it for each read.
    tag:         the version of the file, from ``size_and_tag``.

    Processes may share the folder: one downloads, the others wait. An incomplete download, or one from a command that
    failed, is retried and never kept. Raises UnavailableError after the last attempt, ChangedError for another version.
    """
    make_dirs(cache_dir)
    return fetch(_backend(url), url, local_path(cache_dir), limit_bytes, tag)
