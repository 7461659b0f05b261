"""Servers on loopback with faults on demand: files over HTTP, and S3 as moto serves it."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .contract import Skipped


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Faults:
    """What the next requests meet. Each count goes down with every request that met it.

    busy: replies of 503. cut: bodies that end half-way. stall: bodies that stop half-way for ``seconds``.
    """

    def __init__(self):
        self.busy = self.cut = self.stall = 0
        self.seconds = 0.0
        self.met = 0
        self._lock = threading.Lock()

    def take(self, name: str) -> bool:
        with self._lock:
            left = getattr(self, name)
            setattr(self, name, max(0, left - 1))
            self.met += left > 0
            return left > 0


class FolderServer(ThreadingHTTPServer):
    """The files of a folder at ``url``, with byte ranges and ETags."""

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults = folder, Faults()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FolderServer

    def do_GET(self):
        faults, path = self.server.faults, self.server.folder / self.path.lstrip("/")
        if faults.take("busy"):
            self.send_error(503)
            return
        if not path.is_file():
            self.send_error(404)
            return
        data, status = path.read_bytes(), 200
        tag, total = f'"{path.stat().st_mtime_ns}-{len(data)}"', len(data)
        if self.headers.get("If-Match", tag) != tag:
            self.send_error(412)
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span and self.headers.get("If-Range", tag) == tag:
            start, end = int(span[1]), min(int(span[2] or total - 1), total - 1)
            if start >= total:
                self.send_error(416)
                return
            data, status = data[start : end + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", tag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            half = len(data) // 2
            if half and faults.take("cut"):
                self.wfile.write(data[:half])
                return
            if half and faults.take("stall"):
                self.wfile.write(data[:half])
                self.wfile.flush()
                time.sleep(faults.seconds)
                return
            self.wfile.write(data)

    def log_message(self, *arguments):
        """Nothing: thousands of requests."""


@contextlib.contextmanager
def serving_folder(folder: Path) -> Iterator[FolderServer]:
    with FolderServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _FaultyApp:
    """A WSGI application with faults before and in its replies."""

    def __init__(self, app: Any, faults: Faults):
        self.app, self.faults = app, faults

    def __call__(self, environ, start_response):
        reads = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".tar")
        if reads and self.faults.take("busy"):
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self.app(environ, start_response))
        cut = reads and len(body) > 1 and self.faults.take("cut")
        return [body[: len(body) // 2] if cut else body]


class S3Server:
    """moto's S3 with a bucket of its own, until ``stop``; ``start`` again serves what was stored before."""

    def __init__(self) -> None:
        try:
            import boto3  # noqa: F401  (what the product reads S3 with)
            from moto.server import DomainDispatcherApplication, create_backend_app
        except ImportError:
            raise Skipped("moto[server] and boto3 are not installed: pip install 'diff_dalle[test]'") from None
        self.faults = Faults()
        self._app = _FaultyApp(DomainDispatcherApplication(create_backend_app), self.faults)
        self.port = unused_port()
        self.bucket = f"drill-{self.port}"  # all servers of a process have the same store
        self.start()

    def start(self) -> None:
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", self.port, self._app, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def env(self) -> dict[str, str]:
        keys = {"AWS_ACCESS_KEY_ID": "drill", "AWS_SECRET_ACCESS_KEY": "drill", "AWS_DEFAULT_REGION": "us-east-1"}
        return {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}

    def put(self, name: str, data: bytes) -> None:
        self._client().put_object(Bucket=self.bucket, Key=name, Body=data)

    def upload(self, folder: Path) -> None:
        """Store the shards of a folder in a new bucket."""
        self._client().create_bucket(Bucket=self.bucket)
        for path in folder.glob("*.tar"):
            self.put(path.name, path.read_bytes())

    def _client(self):
        import boto3

        env = self.env
        return boto3.client(
            "s3",
            endpoint_url=env["AWS_ENDPOINT_URL"],
            region_name=env["AWS_DEFAULT_REGION"],
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        )


@contextlib.contextmanager
def serving_s3(folder: Path) -> Iterator[S3Server]:
    server = S3Server()
    try:
        server.upload(folder)
        yield server
    finally:
        server.stop()
