"""gs:// and az:// through blobfile, imported only when such a path is used."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator

from ..errors import redact
from .paths import FileInfo, State
from .remote import Body, RemoteReader
from .retries import CONNECT_SECONDS, SILENT_SECONDS

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
