"""S3 on loopback as moto serves it, with faults on demand."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from file_server import unused_port

from .contract import Skipped


class S3Server:
    """moto's S3 with a bucket of its own, until ``stop``; ``start`` again serves what was stored before.

    Faults: busy: number of reads of shards to refuse with 503. cut: number of their replies to break off half-way.
    """

    def __init__(self) -> None:
        try:
            import boto3  # noqa: F401  (what the product reads S3 with)
            from moto.server import DomainDispatcherApplication, create_backend_app
        except ImportError:
            raise Skipped("moto[server] and boto3 are not installed: pip install 'diff_dalle[test]'") from None
        self.busy = self.cut = 0
        self._app = DomainDispatcherApplication(create_backend_app)
        self.port = unused_port()
        self.bucket = f"drill-{self.port}"  # all servers of a process have the same store
        self.start()

    def start(self) -> None:
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", self.port, self._reply, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _reply(self, environ, start_response):
        reads = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(".tar")
        if reads and self.busy:
            self.busy -= 1
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self._app(environ, start_response))
        if reads and self.cut and len(body) > 1:
            self.cut -= 1
            body = body[: len(body) // 2]
        return [body]

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
    """The shards of a folder in a new bucket."""
    server = S3Server()
    try:
        server._client().create_bucket(Bucket=server.bucket)
        for path in folder.glob("*.tar"):
            server.put(path.name, path.read_bytes())
        yield server
    finally:
        server.stop()
