"""Services of tiny models, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diff_dalle.commands.serve import Limits, ModelsConfig
from diff_dalle.web.api import Service, create_app
from diff_dalle.web.models import Models
from diff_dalle.web.server import whole_app

needs_web = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="the extra web is missing")


def make_service(models: str, limits: Limits | None = None, **files) -> Service:
    given = {name: (path,) if isinstance(path, str) else path for name, path in files.items()}
    return Service(Models(ModelsConfig(tuple(models.split(",")), precision="fp32", **given), "cpu"), limits or Limits())


def equipped(files, limits: Limits | None = None) -> Service:
    """A service of the models ``one``, with all that can go with a model, and ``cascade``."""
    own = {
        name: f"one={files[file]}" for name, file in (("classifier_path", "classifier"), ("controlnet", "controlnet"))
    }
    own |= {"lora": tuple(f"one={path}" for path in files["loras"]), "upsampler_paths": f"cascade={files['middle']}"}
    return make_service(f"one={files['base']},cascade={files['low']}", limits, **own)


def client_of(service: Service):
    """A client of the API, without a server."""
    from starlette.testclient import TestClient

    return TestClient(create_app(service))


@contextlib.contextmanager
def serving(service: Service, app: Any = None) -> Iterator[str]:
    """The address of API and page, on a free port of this machine."""
    import uvicorn

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app or whole_app(service), log_level="error", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, args=([place],), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{place.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def inaccessible(view) -> list[tuple[str, list[str]]]:
    """What a page in the browser has against WCAG's levels A and AA: rules with the elements that break them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is missing")
    found = axe.Axe().run(view, options={"runOnly": ["wcag2a", "wcag2aa"]}).response["violations"]
    return [(each["id"], [node["html"][:300] for node in each["nodes"]]) for each in found]


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


class Gate:
    """Work that goes on when it is told to; ``steps`` counts the calls of ``watch``."""

    def __init__(self):
        self.started, self.open, self.steps = threading.Event(), threading.Event(), 0

    def __call__(self, watch):
        self.started.set()
        while not self.open.wait(0.001):
            self.steps += 1
            watch(None)
        return self


def call(app, *messages):
    """The status and the body with which an ASGI application answers a POST of these messages, after which nothing
    comes."""
    sent, waiting = [], list(messages)

    async def receive():
        return waiting.pop(0) if waiting else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/sample", "headers": headers, "query_string": b""}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return sent[0]["status"], json.loads(sent[1]["body"])
