"""A web server on loopback for files in memory, with faults on demand."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import zlib
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar


class FileServer(ThreadingHTTPServer):
    """files: bytes by path. ranges, tags: whether byte ranges and ETags are supported. requests: the paths asked for.
    headers: theirs. sent: bytes of files sent.

    Faults: cut: number of replies to break off half-way; stall: to stop half-way, until the server ends. busy: number
    of requests to refuse; wait: their Retry-After. busy_share: fraction of the requests to refuse. silent: whether
    replies stop after the headers."""

    daemon_threads = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.files: dict[str, bytes] = {}
        self.ranges, self.tags = True, True
        self.cut, self.stall, self.busy, self.wait, self.busy_share, self.silent = 0, 0, 0, "", 0.0, False
        self.dice = random.Random(0)
        self.requests: list[str] = []
        self.headers: list[Message] = []
        self.sent = 0
        self.ended = threading.Event()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def put(self, name: str, data: bytes) -> None:
        self.files[f"/{name}"] = data

    def handle_error(self, request, client_address):
        """Nothing: clients may end a connection early."""


def _tag(data: bytes) -> str:
    return f'"{zlib.crc32(data)}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms for the client to confirm the headers

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.requests.append(path)
        server.headers.append(self.headers)
        if server.busy or server.dice.random() < server.busy_share:
            server.busy = max(0, server.busy - 1)
            self._refuse(503, {"Retry-After": server.wait} if server.wait else {})
            return
        if path not in server.files:
            self._refuse(403 if path.startswith("/secret") else 404)
            return
        data, status = server.files[path], 200
        total, tag = len(data), _tag(data)
        if server.tags and self.headers.get("If-Match", tag) != tag:
            self._refuse(412)
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span and server.ranges:
            start, end = int(span[1]), int(span[2] or total - 1)
            if start >= total:
                self._refuse(416)
                return
            data, status = data[start : end + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if server.tags:
            self.send_header("ETag", tag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
        self.end_headers()
        if server.silent:
            self.wfile.flush()
            server.ended.wait(20)
            return
        if server.cut and len(data) > 1:
            server.cut -= 1
            data = data[: len(data) // 2]
            self.close_connection = True
        if server.stall and len(data) > 1:
            server.stall -= 1
            self.wfile.write(data[: len(data) // 2])
            server.ended.wait()
            return
        with contextlib.suppress(ConnectionError):  # a client that only reads the headers
            server.sent += len(data)
            self.wfile.write(data)

    def do_HEAD(self):
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        found = self.server.files.get(path)
        self._refuse(
            404 if found is None else 200, {"Content-Length": str(len(found or b"")), "ETag": _tag(found or b"")}
        )

    def _refuse(self, status: int, headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in {"Content-Length": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args):
        """Nothing: the tests read ``requests``."""


Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextlib.contextmanager
def served(server: Server) -> Iterator[Server]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def serving() -> contextlib.AbstractContextManager[FileServer]:
    return served(FileServer())


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
