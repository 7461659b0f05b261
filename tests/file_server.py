"""A web server on loopback for files in memory, with faults on demand."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """files: bytes by path. ranges: whether range requests are served. cut: number of replies to break off half-way.
    busy: number of requests to refuse. requests: the paths asked for. sent: bytes of files sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.ranges, self.cut, self.busy = True, 0, 0
        self.requests: list[str] = []
        self.sent = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.requests.append(path)
        if server.busy:
            server.busy -= 1
            self.send_error(503)
            return
        if path not in server.files:
            self.send_error(403 if path.startswith("/secret") else 404)
            return
        data, status = server.files[path], 200
        total = len(data)
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span and server.ranges:
            start, end = int(span[1]), int(span[2] or total - 1)
            if start >= total:
                self.send_error(416)
                return
            data, status = data[start : end + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hash(server.files[path])}"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
        self.end_headers()
        if server.cut and len(data) > 1:
            server.cut -= 1
            data = data[: len(data) // 2]
        with contextlib.suppress(ConnectionError):  # a client that only reads the headers
            server.sent += len(data)
            self.wfile.write(data)

    def log_message(self, *args):
        """Nothing: the tests read ``requests``."""


@contextlib.contextmanager
def serving() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
