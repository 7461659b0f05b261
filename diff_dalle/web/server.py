"""API and page on one address."""

from __future__ import annotations

import collections
import signal
import sys
from typing import Any

from ..commands.serve import AddressConfig
from .api import Service, create_app
from .door import Door
from .gradio_setup import appearance, load_gradio, uploads_folder
from .refusal import Refusal, Shares

CONNECTIONS = 500  # more are answered 503
CONNECTIONS_EACH = 64  # of one client; more are closed
HEAD_SECONDS = 10.0  # for a client to send the head of a request


def protocol() -> type:
    """uvicorn's HTTP/1.1 with two limits that it has not: a connection on which no request begins in time, or begins
    but does not get beyond its head, is closed, and so are those of a client that has too many."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    connections = Shares("connections", CONNECTIONS_EACH)

    class Impatient(H11Protocol):
        has_share = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.wait_for_head()
            self.address = self.client[0] if self.client else None
            try:
                connections.take(self.address)
                self.has_share = True
            except Refusal:
                self.connections.discard(self)  # else a burst of these would reach the limit of all
                transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self.waiting.cancel()
            if self.has_share:
                connections.give_back(self.address)
            super().connection_lost(exc)

        def wait_for_head(self) -> None:
            self.waiting = self.loop.call_later(HEAD_SECONDS, self.close_without_head, self.cycle)

        def close_without_head(self, cycle: Any) -> None:
            """cycle: the request that had come last when the wait began."""
            if self.cycle is cycle:
                self.transport.close()

    return Impatient


def whole_app(service: Service, address: AddressConfig | None = None) -> Any:
    """The API with the page at "/", an ASGI application. InputError as ``load_gradio``.

    address: whose names requests must be addressed to; None = that of the defaults.
    """
    from starlette.middleware import Middleware

    load_gradio()
    names, folder = (address or AddressConfig()).names(), uploads_folder()
    service.listening = collections.Counter()
    door = Middleware(Door, names, folder, service.limits.disk_bytes, service.listening)
    return with_page(create_app(service, [door]), service)


def with_page(app: Any, service: Service) -> Any:
    """A FastAPI application with the page at "/"."""
    import gradio

    from .page import CSS, build_page

    page = build_page(service)
    # ``mount_gradio_app`` does not set this, as ``launch`` does, and without it gradio does not check the paths of
    # files in requests: whoever names one of the server's files would be shown it.
    page.has_launched = True
    return gradio.mount_gradio_app(
        app,
        page,
        path="",
        max_file_size=service.limits.body_bytes,
        **appearance(CSS),
    )


def serve(service: Service, address: AddressConfig) -> None:
    """Serve until interrupted."""
    import uvicorn

    # uvicorn ends by this handler. The default one would leave the folder of uploads behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    place = f"[{address.host}]" if ":" in address.host else address.host
    print(f"http://{place}:{address.port}", flush=True)
    try:
        uvicorn.run(
            whole_app(service, address),
            host=address.host,
            port=address.port,
            log_level="warning",
            http=protocol(),
            limit_concurrency=CONNECTIONS,
        )
    finally:
        service.close()
