"""Object stores: s3:// through boto3, the extra ``s3``, where AWS_ENDPOINT_URL selects another server; gs:// and az://
through blobfile. Each library is imported only when such a path is used.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator

from ..config import InputError, redact
from .failures import status_of
from .paths import FileInfo, State
from .remote import Body, RemoteReader, beyond_end, byte_range
from .retries import CONNECT_SECONDS, SILENT_SECONDS

CONNECTIONS = 32


@functools.cache
def _client_of(process: int):
    """One client per process, since a forked copy of a connection pool must not be used."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise InputError("s3:// paths need boto3: pip install 'diff_dalle[s3]'") from None
    config = Config(
        retries={"total_max_attempts": 2, "mode": "standard"},  # for the parts of an upload; the rest is ours
        connect_timeout=CONNECT_SECONDS,
        read_timeout=SILENT_SECONDS,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )
    return boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"), config=config)


def _client():
    return _client_of(os.getpid())


def _where(path: str) -> dict[str, str]:
    bucket, _, key = path.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": key}


class S3(RemoteReader):
    def exists(self, path: str) -> bool:
        return super().exists(path) or next(self.list_files(path, True), None) is not None

    def list_files(self, folder: str, recursive: bool) -> Iterator[FileInfo]:
        where = _where(folder.rstrip("/") + "/")
        options = {"Prefix": where["Key"].lstrip("/"), **({} if recursive else {"Delimiter": "/"})}
        for page in _client().get_paginator("list_objects_v2").paginate(Bucket=where["Bucket"], **options):
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # an empty object that some tools write to stand for a folder
                    yield FileInfo(f"s3://{where['Bucket']}/{entry['Key']}", entry["Size"], entry["ETag"])

    def size_and_tag(self, path: str) -> State:
        head = _client().head_object(**_where(path))
        return head["ContentLength"], head["ETag"]

    def request(self, path: str, start: int, end: int | None, tag: str) -> Body:
        extra = byte_range(start, end)
        if tag:
            extra["IfMatch"] = tag
        client = _client()
        try:
            reply = client.get_object(**_where(path), **extra)
        except client.exceptions.ClientError as error:
            if status_of(error) == 416:  # the range starts after the end
                return beyond_end(start)
            raise
        total = reply.get("ContentRange", "").rpartition("/")[2]  # of ``bytes 0-0/12345``
        size = int(total) if total else reply["ContentLength"]
        return Body(reply["Body"].read, reply["Body"].close, start, (size, reply["ETag"]))

    def put(self, local: str, path: str):
        _client().upload_file(local, *_where(path).values())

    def make_dirs(self, folder: str):
        """Nothing: object stores have no folders."""

    def remove(self, path: str):
        _client().delete_object(**_where(path))


REQUEST_TRIES = 3  # of one of the many requests of an operation; the operation is repeated by ``retries``
log = logging.getLogger(__name__)


@functools.cache
def _context():
    """blobfile with limits: by default it repeats a request without end."""
    import blobfile

    return blobfile.create_context(
        log_callback=lambda text: log.info("%s", redact(text)),
        retry_limit=REQUEST_TRIES - 1,
        connect_timeout=round(CONNECT_SECONDS),
        read_timeout=round(SILENT_SECONDS),
    )


def _state(status) -> State:
    return status.size, status.version or str(status.mtime)


class Blob(RemoteReader):
    def exists(self, path: str) -> bool:
        return _context().exists(path)

    def list_files(self, folder: str, recursive: bool) -> Iterator[FileInfo]:
        for entry in _context().scandir(folder):
            if entry.is_file:
                yield FileInfo(entry.path, *(_state(entry.stat) if entry.stat else ()))
            elif recursive:
                yield from self.list_files(entry.path, True)

    def size_and_tag(self, path: str) -> State:
        return _state(_context().stat(path))

    def request(self, path: str, start: int, end: int | None, tag: str) -> Body:
        state = _state(_context().stat(path))  # which blobfile would ask for otherwise
        # A smaller buffer than blobfile's 8 MB: it requests as much as the buffer holds.
        buffer = {} if end is None else {"buffer_size": max(1, min(end, state[0]) - start)}
        file = _context().BlobFile(path, "rb", file_size=state[0], **buffer)
        file.seek(start)
        return Body(file.read, file.close, start, state, beyond=start > state[0])

    def put(self, local: str, path: str):
        _context().copy(local, path, overwrite=True)

    def make_dirs(self, folder: str):
        _context().makedirs(folder)

    def remove(self, path: str):
        _context().remove(path)
