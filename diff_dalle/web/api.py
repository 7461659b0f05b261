"""The HTTP API: JSON in, PNG or JSON out, with the refusals of limits, models and queue as sentences."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from typing import Any

import numpy as np
from PIL import Image

from ..commands.serve import Limits
from ..config import from_dict, to_dict
from ..errors import InputError
from ..images.output import png_bytes
from .models import Models
from .refusal import Refusal
from .repeat import command_line, python_code
from .wish import Pictures, Result, Wish, read_picture, work_of
from .worker import Job, Snapshot, Worker

POLL = 0.02  # seconds between two looks at a job
BODY_SECONDS = 60.0  # for a client to send a request
FORMATS = ("png", "json")
_PICTURES = ("init_image", "mask", "control_image")


class Service:
    """Models, limits and the sampling thread: what API and page share."""

    def __init__(self, models: Models, limits: Limits):
        self.models, self.limits = models, limits
        self.worker = Worker(limits.max_queue, limits.max_seconds)

    def submit(self, wish: Wish, pictures: Pictures) -> Job:
        """Queue a wish. Raises Refusal as ``work_of`` and for a full queue."""
        return self.worker.submit(work_of(wish, pictures, self.models, self.limits))

    def repeat(self, wish: Wish, pictures: Pictures) -> tuple[str, str]:
        """The command line and the Python code of a wish."""
        model, names = self.models.find(wish.model), list(pictures.given())
        return command_line(wish, model, names), python_code(wish, model, names)


def read_body(body: bytes, limits: Limits) -> tuple[Wish, Pictures, str, bool]:
    """The wish in a JSON text, its pictures, the format of the answer, and whether it shows all stages. Raises
    Refusal."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not a JSON text") from None
    if not isinstance(values, dict):
        raise Refusal(400, 'the body must be a JSON object, such as {"prompt": "a red circle"}')
    format_, stages = values.pop("format", "png"), values.pop("stages", False)
    if format_ not in FORMATS or not isinstance(stages, bool):
        raise Refusal(400, f"format must be one of {', '.join(FORMATS)}, and stages true or false")
    pictures = {name: _picture(values.pop(name), name, limits) for name in _PICTURES if values.get(name) is not None}
    values = {name: value for name, value in values.items() if value is not None}
    try:
        wish = from_dict(Wish, values)
    except InputError as error:
        raise Refusal(400, str(error)) from None
    if format_ == "png" and (wish.num_images != 1 or stages):
        raise Refusal(400, 'a png holds one image: set num_images to 1 and leave stages out, or set format to "json"')
    return wish, Pictures(**pictures), format_, stages


def _picture(text: Any, name: str, limits: Limits) -> np.ndarray:
    if not isinstance(text, str):
        raise Refusal(400, f"{name} must be a png, jpeg or webp file as a base64 text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(400, f"{name} must be a png, jpeg or webp file as a base64 text") from None
    return read_picture(data, name, limits)


def png(image: np.ndarray) -> bytes:
    """A PNG file of uint8 [H, W, 3]."""
    return png_bytes(Image.fromarray(image))


def _base64(image: np.ndarray) -> str:
    return base64.b64encode(png(image)).decode("ascii")


def answer_of(service: Service, wish: Wish, pictures: Pictures, done: Snapshot, stages: bool) -> dict:
    """The JSON answer: images as base64 PNG files, and all that repeats them."""
    command, code = service.repeat(wish, pictures)
    result: Result = done.result
    answer: dict[str, Any] = {
        "images": [_base64(image) for image in result.images],
        "seeds": [wish.seed + i for i in range(wish.num_images)],
        "wish": to_dict(wish),
        "seconds": round(done.seconds, 3),
        "command": command,
        "python": code,
    }
    if stages:
        answer["stages"] = [[_base64(image) for image in images] for images in result.stages]
    return answer


def create_app(service: Service) -> Any:
    """The API as a FastAPI application. ``server.py`` adds the page."""
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def refused(request: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        headers = {"Retry-After": "1"} if refusal.status == 503 else None
        return JSONResponse({"error": refusal.sentence}, refusal.status, headers)

    async def models(request: Request) -> Response:
        return JSONResponse({"models": [model.about() for model in service.models.served.values()]})

    async def sample(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":  # which another site's page cannot send without asking first
            raise Refusal(415, "the body must be JSON: set the header Content-Type to application/json")
        service.worker.check_room()
        body = await request.body()
        wish, pictures, format_, stages = await run_in_threadpool(read_body, body, service.limits)
        job = service.submit(wish, pictures)
        try:
            while not job.over:
                if await request.is_disconnected():
                    raise Refusal(499, "the client went away")
                await asyncio.sleep(POLL)
        finally:
            job.cancel()  # nothing, if it is over
        done = job.snapshot()
        if done.refusal is not None:
            raise done.refusal
        if format_ == "png":
            return Response(await run_in_threadpool(png, done.result.images[0]), media_type="image/png")
        return JSONResponse(await run_in_threadpool(answer_of, service, wish, pictures, done, stages))

    app.add_exception_handler(Refusal, refused)
    app.add_route("/api/models", models, methods=["GET"])
    app.add_route("/api/sample", sample, methods=["POST"])
    app.add_middleware(BodyLimit, service.limits.body_bytes, BODY_SECONDS)
    return app


class BodyLimit:
    """ASGI middleware: refuses a body that is too large, or that does not come in time, as soon as it is known."""

    def __init__(self, app: Any, most: int, seconds: float):
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen, started, complete = 0, False, False
        deadline = asyncio.get_running_loop().time() + self.seconds

        async def limited() -> Any:
            nonlocal seen, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - asyncio.get_running_loop().time(), 0.0))
            except asyncio.TimeoutError:
                raise Refusal(408, f"the body must come within {self.seconds:g} s") from None
            seen += len(message.get("body", b""))
            if seen > self.most:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            length = dict(scope["headers"]).get(b"content-length", b"0")
            if length.isdigit() and int(length) > self.most:
                raise self._too_large()
            await self.app(scope, limited, watched)
        except Refusal as refusal:
            if started:
                raise
            from fastapi.responses import JSONResponse

            await JSONResponse({"error": refusal.sentence}, refusal.status)(scope, receive, send)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body has more than {self.most >> 20} MiB, the limit")
