"""The HTTP API: JSON in, PNG or JSON out, with the refusals of limits, models and queue as sentences."""

from __future__ import annotations

import asyncio
import base64
import collections
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..commands.serve import Limits
from ..config import Fault, InputError, from_dict, to_dict
from .door import BODY_SECONDS, BodyLimit, read_json
from .models import Models
from .pictures import PICTURES, Pictures, base64_png, png, read_pictures
from .refusal import Refusal, Shares, address_of
from .repeat import command_line, python_code
from .wish import Result, Wish, check_wish, size_asked, work_of
from .worker import Job, Snapshot, Worker

POLL = 0.02  # seconds between two looks at a job
FORMATS = ("png", "json")
READERS = 2  # requests whose pictures are decoded at the same time
Value = TypeVar("Value")


class Service:
    """Models, limits and the sampling thread: what API and page share."""

    def __init__(self, models: Models, limits: Limits):
        self.models, self.limits = models, limits
        self.worker = Worker(limits.max_queue, limits.max_seconds)
        self.jobs_each = Shares("requests", max(1, limits.max_queue // 2))
        self.listening: collections.Counter[str] | None = None  # the page's visitors, where they are known
        self._readers = ThreadPoolExecutor(READERS, "reading")

    async def read(self, reader: Callable[..., Value], *arguments: Any) -> Value:
        """``reader(*arguments)`` in one of the few threads that decode pictures."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, reader, *arguments)

    def submit(self, wish: Wish, pictures: Pictures, place: Job | None = None) -> Job:
        """Queue a wish. Raises InputError as ``work_of`` and, without a place, Refusal for a full queue."""
        return self.worker.submit(work_of(wish, pictures, self.models, self.limits), place)

    def repeat(self, wish: Wish, pictures: Pictures) -> dict[str, Any]:
        """What samples the images of a wish again: itself as plain values, its command line and its Python code."""
        model, names = self.models.find(wish.model), list(pictures.given())
        texts = {"command": command_line(wish, model, names), "python": python_code(wish, model, names)}
        return {"wish": to_dict(wish), **texts}

    def close(self) -> None:
        """Cancel all jobs and end the threads."""
        self.worker.close()
        self._readers.shutdown(cancel_futures=True)


@dataclass(frozen=True, eq=False)
class Asked:
    """What a request to the API asks for. stages: whether the answer has the images of all stages."""

    wish: Wish
    pictures: Pictures
    format: str
    stages: bool


def read_body(body: bytes | bytearray, models: Models, limits: Limits) -> Asked:
    """What a JSON text asks for. Its pictures are decoded last, if the rest can be done. Raises InputError."""
    values = read_json(body, PICTURES)
    if not isinstance(values, dict):
        raise InputError('the body must be a JSON object, such as {"prompt": "a red circle"}')
    format_, stages = values.pop("format", "png"), values.pop("stages", False)
    if format_ not in FORMATS or not isinstance(stages, bool):
        raise InputError(f"format must be one of {', '.join(FORMATS)}, and stages true or false")
    texts = {name: values.pop(name) for name in PICTURES if name in values}
    wish = from_dict(Wish, {name: value for name, value in values.items() if value is not None})
    if format_ == "png" and (wish.num_images != 1 or stages):
        raise InputError('a png holds one image: set num_images to 1 and leave stages out, or set format to "json"')
    model = check_wish(wish, models, limits)
    files = {name: _file(text, name) for name, text in texts.items() if text is not None}
    return Asked(wish, read_pictures(files, size_asked(wish, model), limits), format_, stages)


def _file(text: Any, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise InputError(Fault(name, "must be a png, jpeg or webp file as a base64 text")) from None


def answer_of(service: Service, wish: Wish, done: Snapshot, stages: bool) -> dict:
    """The JSON answer: images as base64 PNG files, and all that repeats them."""
    result: Result = done.result
    answer: dict[str, Any] = {
        "images": [base64_png(image) for image in result.images],
        "seeds": [wish.seed + i for i in range(wish.num_images)],
        "seconds": round(done.seconds, 3),
        **service.repeat(wish, result.pictures),
    }
    if pictures := result.pictures.texts():
        answer["pictures"] = pictures
    if stages:
        answer["stages"] = [[base64_png(image) for image in images] for images in result.stages]
    return answer


def create_app(service: Service, within: Sequence[Any] = ()) -> Any:
    """The API as a FastAPI application. ``server.py`` adds the page.

    within: further starlette middleware, between the limit of bodies and what is served.
    """
    from fastapi import FastAPI, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import JSONResponse
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect

    limit = Middleware(BodyLimit, service.limits.body_bytes, BODY_SECONDS)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=[limit, *within])

    async def refused(request: Request, error: Exception) -> Response:
        status = getattr(error, "status", 400)
        return JSONResponse({"error": str(error)}, status, {"Retry-After": "1"} if status == 503 else None)

    async def models(request: Request) -> Response:
        return JSONResponse({"models": [model.about() for model in service.models.served.values()]})

    async def whole(request: Request) -> bytearray:
        """The body, which ``Request.body`` would keep until the answer."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
        except ClientDisconnect:
            raise Refusal(499, "the client went away") from None
        return body

    async def sample(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which another site's page cannot send without asking first
            raise Refusal(415, "the body must be JSON: set the header Content-Type to application/json")
        service.worker.check_room()  # before a body is read for nothing
        body = await whole(request)
        with service.jobs_each.hold(address_of(request.scope)):
            with service.worker.place() as place:
                asked = await service.read(read_body, body, service.models, service.limits)
                del body
                job = service.submit(asked.wish, asked.pictures, place)
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
        if asked.format == "png":
            return Response(await run_in_threadpool(png, done.result.images[0]), media_type="image/png")
        return JSONResponse(await run_in_threadpool(answer_of, service, asked.wish, done, asked.stages))

    app.add_exception_handler(InputError, refused)
    app.add_route("/api/models", models, methods=["GET"])
    app.add_route("/api/sample", sample, methods=["POST"])
    return app
