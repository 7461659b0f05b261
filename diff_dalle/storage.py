"""Local and remote files behind one set of functions, and writes that are never half visible.

A path is local (also ``file:``), ``s3://`` (boto3, the extra ``s3``), ``gs://`` or ``az://`` (blobfile), ``http(s)://``
(read only), or ``pipe:COMMAND``, whose output is the file (read only, from its start). What those libraries raise for
a missing file, a lack of permission or a full disk comes out as an InputError naming the path.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import BinaryIO

from .errors import InputError

try:
    import fcntl
except ImportError:  # Windows: two processes may then fetch the same file twice, which is wasteful but right
    fcntl = None

TRIES = 4
RETRY_SECONDS = 0.5  # doubled after each try
TIMEOUT_SECONDS = 60.0
CHUNK = 1 << 20


# ------------------------------------------------------------------------------------------------------------ paths


def scheme(path: str) -> str:
    """``"s3"`` for ``s3://…``, ``"pipe"`` for ``pipe:…``, and ``""`` for a local path or ``file:``."""
    if path.startswith("pipe:"):
        return "pipe"
    match = re.match(r"([a-z][a-z0-9+.-]+)://", path)
    return match.group(1) if match and match.group(1) != "file" else ""


def is_remote(path: str) -> bool:
    return scheme(path) != ""


def local_path(path: str) -> str:
    """A local path without the ``file:`` it may carry."""
    if path.startswith("file:"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(path).path)
    return os.path.expanduser(path)


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(local_path(folder), name)


def split(path: str) -> tuple[str, str]:
    """Folder and name; the query of a URL is not part of the name."""
    if not is_remote(path):
        return os.path.split(local_path(path))
    folder, _, name = path.partition("?")[0].rpartition("/")
    return folder, name


# --------------------------------------------------------------------------------------------------------- backends


class _Local:
    def exists(self, path: str) -> bool:
        return os.path.exists(local_path(path))

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        seen = set()
        for place, folders, names in os.walk(local_path(folder), followlinks=True, onerror=_raise):
            real = os.path.realpath(place)
            folders[:] = sorted(name for name in folders if recursive and not name.startswith(".")) * (real not in seen)
            yield from (os.path.join(place, name) for name in names * (real not in seen))
            seen.add(real)

    def size_and_tag(self, path: str) -> tuple[int, str]:
        status = os.stat(local_path(path))
        return status.st_size, str(status.st_mtime_ns)

    def open_read(self, path: str) -> BinaryIO:
        return open(local_path(path), "rb")

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        with self.open_read(path) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    def make_dirs(self, folder: str):
        os.makedirs(local_path(folder), exist_ok=True)

    def remove(self, path: str):
        os.remove(local_path(path))


class _ReadOnly:
    """What cannot be listed or written."""

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        raise InputError(f"{folder} cannot be listed; name its files one by one or as a brace range {{000..123}}")

    def put(self, local: str, path: str):
        raise InputError(f"{path} can only be read; write to a local folder, s3://, gs:// or az://")

    remove = make_dirs = functools.partialmethod(put, "")


class _Http(_ReadOnly):
    def _open(self, path: str, headers: dict[str, str]):
        request = urllib.request.Request(path, headers={"User-Agent": "diff_dalle", **headers})
        return _retry(lambda: urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS))

    def exists(self, path: str) -> bool:
        try:
            self._open(path, {"Range": "bytes=0-0"}).close()
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                return False
            raise
        return True

    def size_and_tag(self, path: str) -> tuple[int, str]:
        with self._open(path, {"Range": "bytes=0-0"}) as reply:  # some servers refuse HEAD
            total = reply.headers.get("Content-Range", "").rpartition("/")[2] or reply.headers.get("Content-Length", "")
            tag = reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""
        return (int(total) if total.isdigit() else -1), tag

    def by_offset(self, path: str) -> bool:
        with self._open(path, {"Range": "bytes=0-0"}) as reply:
            return reply.status == 206

    def open_read(self, path: str) -> BinaryIO:
        return self._open(path, {})

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        if offset == 0 and size is None:
            with self.open_read(path) as reply:
                return reply.read()
        if size == 0:
            return b""
        end = "" if size is None else offset + size - 1

        def fetch() -> bytes:
            with self._open(path, {"Range": f"bytes={offset}-{end}"}) as reply:
                if reply.status != 206:
                    raise InputError(f"{path}: the server does not serve parts of files; download it first")
                return reply.read()

        try:
            return _retry(fetch)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the range starts beyond the end, where a local file gives b"" too
                return b""
            raise


class _PipeOutput(io.RawIOBase):
    """The output of a shell command; its end is only accepted from a command that succeeded."""

    def __init__(self, path: str):
        self.path = path
        self.process = subprocess.Popen(path.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self.process.stdout.readinto(buffer)
        if count == 0 and self.process.wait() != 0:
            raise InputError(f"{self.path}: the command ended with status {self.process.returncode}")
        return count

    def close(self):
        if not self.closed:
            self.process.stdout.close()
            self.process.wait()
        super().close()


class _Pipe(_ReadOnly):
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


@functools.cache
def _s3_client(process: int):
    """One client per process: a forked copy of a connection pool must not be used."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise InputError("s3:// paths need boto3: pip install 'diff_dalle[s3]'") from None
    config = Config(retries={"max_attempts": TRIES, "mode": "standard"})
    return boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"), config=config)


class _S3:
    def _client(self):
        return _s3_client(os.getpid())

    def _where(self, path: str) -> dict[str, str]:
        bucket, _, key = path.removeprefix("s3://").partition("/")
        return {"Bucket": bucket, "Key": key}

    def exists(self, path: str) -> bool:
        try:
            self.size_and_tag(path)
        except self._client().exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return next(self.list_files(path, True), None) is not None
            raise
        return True

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        where = self._where(folder.rstrip("/") + "/")
        options = {"Prefix": where["Key"].lstrip("/"), **({} if recursive else {"Delimiter": "/"})}
        for page in self._client().get_paginator("list_objects_v2").paginate(Bucket=where["Bucket"], **options):
            yield from (f"s3://{where['Bucket']}/{entry['Key']}" for entry in page.get("Contents", ()))

    def size_and_tag(self, path: str) -> tuple[int, str]:
        head = self._client().head_object(**self._where(path))
        return head["ContentLength"], head["ETag"]

    def open_read(self, path: str) -> BinaryIO:
        return self._client().get_object(**self._where(path))["Body"]

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        if size == 0:
            return b""
        span = f"bytes={offset}-{'' if size is None else offset + size - 1}"
        extra = {} if offset == 0 and size is None else {"Range": span}
        try:
            return self._client().get_object(**self._where(path), **extra)["Body"].read()
        except self._client().exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 416:
                return b""
            raise

    def put(self, local: str, path: str):
        self._client().upload_file(local, *self._where(path).values())

    def make_dirs(self, folder: str):
        """Object stores have no folders."""

    def remove(self, path: str):
        self._client().delete_object(**self._where(path))


class _Blob:
    """gs:// and az:// through blobfile, which is imported here only."""

    @property
    def _library(self):
        import blobfile

        return blobfile

    def exists(self, path: str) -> bool:
        return self._library.exists(path)

    def list_files(self, folder: str, recursive: bool) -> Iterator[str]:
        if recursive:
            for place, _, names in self._library.walk(folder):
                yield from (self._library.join(place, name) for name in names)
        else:
            yield from (entry.path for entry in self._library.scandir(folder) if entry.is_file)

    def size_and_tag(self, path: str) -> tuple[int, str]:
        status = self._library.stat(path)
        return status.size, status.version or str(status.mtime)

    def open_read(self, path: str) -> BinaryIO:
        return self._library.BlobFile(path, "rb")

    def read(self, path: str, offset: int, size: int | None) -> bytes:
        with self.open_read(path) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    def put(self, local: str, path: str):
        self._library.copy(local, path, overwrite=True)

    def make_dirs(self, folder: str):
        self._library.makedirs(folder)

    def remove(self, path: str):
        self._library.remove(path)


_BACKENDS = {
    "": _Local(),
    "http": _Http(),
    "https": _Http(),
    "pipe": _Pipe(),
    "s3": _S3(),
    "gs": _Blob(),
    "az": _Blob(),
}


def _backend(path: str):
    kind = scheme(path)
    if kind not in _BACKENDS:
        raise InputError(f"{path}: {kind}:// is not supported (local paths, {', '.join(filter(None, _BACKENDS))} are)")
    return _BACKENDS[kind]


# ----------------------------------------------------------------------------------------------------------- errors


def _raise(error: Exception):
    raise error


def _retry(call):
    """``call()``, tried again after a failure that may pass: a lost connection or a busy server."""
    for attempt in range(TRIES):
        try:
            return call()
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            passing = not isinstance(error, urllib.error.HTTPError) or error.code in (408, 429, 500, 502, 503, 504)
            if not passing or attempt == TRIES - 1:
                raise
            time.sleep(RETRY_SECONDS * 2**attempt)


_STATUS = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError}
_REASONS = {
    FileNotFoundError: "does not exist",
    NotADirectoryError: "is not a folder",
    IsADirectoryError: "is a folder, not a file",
    PermissionError: "may not be read or written: permission denied",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _status(error: BaseException) -> int | None:
    """The HTTP status in the errors of urllib, botocore and blobfile, none of which need be installed."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(error, "code", None) or getattr(error, "response_status", None)


@contextlib.contextmanager
def explained(path: str):
    """Turn what backends raise about ``path`` into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        library = type(error).__module__.split(".")[0]
        if not isinstance(error, OSError) and library not in ("botocore", "boto3", "blobfile", "http"):
            raise
        if getattr(error, "errno", None) in _FULL:
            reason = "cannot be written: the disk is full or a quota is used up"
        else:
            kind = _STATUS.get(_status(error), type(error))
            reason = next((text for known, text in _REASONS.items() if issubclass(kind, known)), f"failed: {error}")
        raise InputError(f"{path} {reason}") from error


# ---------------------------------------------------------------------------------------------------------- reading


def exists(path: str) -> bool:
    with explained(path):
        return _backend(path).exists(path)


def list_files(folder: str, recursive: bool = False) -> list[str]:
    """The files of a folder, sorted, without hidden ones; with those of all folders below when ``recursive``."""
    with explained(folder):
        found = _backend(folder).list_files(folder, recursive)
        return sorted(path for path in found if not split(path)[1].startswith("."))


def size_and_tag(path: str) -> tuple[int, str]:
    """Size in bytes (-1 when unknown) and a tag that changes with the content: modification time or ETag."""
    with explained(path):
        return _backend(path).size_and_tag(path)


def reads_by_offset(path: str) -> bool:
    """Whether parts of the file can be read without reading what lies before them."""
    if scheme(path) in ("http", "https"):
        with explained(path):
            return _backend(path).by_offset(path)
    return scheme(path) != "pipe"


def read_bytes(path: str, offset: int = 0, size: int | None = None) -> bytes:
    """``size`` bytes (None: all) from ``offset`` on; fewer where the file ends."""
    with explained(path):
        return _backend(path).read(path, offset, size)


def read_text(path: str) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file in UTF-8") from None


def open_read(path: str) -> BinaryIO:
    """A binary stream from the start of the file, to be closed by the caller."""
    with explained(path):
        return _backend(path).open_read(path)


# ---------------------------------------------------------------------------------------------------------- writing


def make_dirs(folder: str):
    with explained(folder):
        _backend(folder).make_dirs(folder)


def remove(path: str):
    with explained(path):
        _backend(path).remove(path)


@contextlib.contextmanager
def atomic_writer(path: str) -> Iterator[BinaryIO]:
    """A binary file that appears under ``path`` when the block ends well, and not at all otherwise.

    Written to a hidden temporary beside it, flushed to the disk and renamed; a remote file is uploaded whole from a
    local temporary. After any error, a full disk included, the temporary is gone and what was there before is intact.
    """
    with explained(path):
        if is_remote(path):
            backend = _backend(path)
            with tempfile.NamedTemporaryFile(suffix=".tmp", delete=False) as file:
                try:
                    yield file
                    file.close()
                    backend.put(file.name, path)
                finally:
                    file.close()
                    os.remove(file.name)
            return
        target = os.path.realpath(local_path(path))  # a link stays a link
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115 (closed before the rename, or below)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
        except BaseException as error:
            with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
                file.close()
            os.remove(temporary)
            full = _full_disk(error)
            if full is not None and full is not error:
                raise full from error
            raise
        _sync_folder(folder)


def _full_disk(error: BaseException | None) -> OSError | None:
    """The full disk behind an error: torch.save reports one as a RuntimeError raised while handling it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def _sync_folder(folder: str):
    """Make a rename last through a power failure."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes(path: str, data: bytes):
    """Write a whole file as ``atomic_writer`` does."""
    with atomic_writer(path) as file:
        file.write(data)


# ------------------------------------------------------------------------------------------------------ local copies


@contextlib.contextmanager
def _locked(path: str):
    with open(path, "ab") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or its holder dies
        yield


def _download(url: str, folder: str, target: str):
    size, _ = size_and_tag(url)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".part", delete=False) as file:
        try:
            with open_read(url) as stream:
                while chunk := stream.read(CHUNK):
                    file.write(chunk)
            if size >= 0 and file.tell() != size:
                raise ConnectionError(f"the connection was cut after {file.tell():,} of {size:,} bytes")
            file.close()
            os.replace(file.name, target)
        except BaseException:
            file.close()
            os.remove(file.name)
            raise


def _evict(folder: str, keep: str, limit_bytes: int):
    """Remove the least recently used copies until the rest fits."""
    copies = [entry for entry in os.scandir(folder) if entry.name.endswith(".copy") and entry.path != keep]
    used = sorted((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in copies)
    total = os.path.getsize(keep) + sum(size for _, size, _ in used)
    for _, size, path in used:
        if total <= limit_bytes:
            break
        os.remove(path)
        total -= size


def fetch_to_cache(url: str, cache_dir: str, limit_bytes: int, tag: str = "") -> str:
    """A local copy of ``url`` in ``cache_dir``, fetched unless it is there, and then the path of it.

    The copies that were not used for longest go when all together exceed ``limit_bytes`` (the one just asked for
    always stays). ``tag`` is the version wanted, as from ``size_and_tag``. Any number of processes may share the
    folder: one fetches, the others wait. A download shorter than announced, or from a command that failed, is
    tried again and never kept; InputError after the last try.
    """
    make_dirs(cache_dir)
    name = hashlib.sha256(f"{url}\n{tag}".encode()).hexdigest()[:32]
    target = os.path.join(cache_dir, f"{name}.copy")
    with explained(cache_dir), _locked(os.path.join(cache_dir, f"{name}.lock")):
        for attempt in range(TRIES):
            if os.path.exists(target):
                break
            try:
                _download(url, cache_dir, target)
            except (InputError, OSError) as error:
                if getattr(error, "errno", None) in _FULL:
                    raise
                if attempt == TRIES - 1:
                    raise InputError(f"cannot fetch {url} after {TRIES} tries: {error}") from error
                time.sleep(RETRY_SECONDS * 2**attempt)
        os.utime(target)
        with contextlib.suppress(FileNotFoundError), _locked(os.path.join(cache_dir, "eviction.lock")):
            _evict(cache_dir, target, limit_bytes)
    return target
