"""Which requests reach API and page: gradio has more routes than a page needs, and some would serve an attacker."""

from __future__ import annotations

import asyncio
import collections
import json
from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..config import InputError
from .gradio_setup import holds, make_room
from .refusal import Refusal, Shares, address_of

BODY_SECONDS = 60.0  # for a client to send a request
PREFIX = "/gradio_api/"
FILES = f"{PREFIX}file="
EVENTS = f"{PREFIX}queue/data"
# Those that the page asks for. Others fetch addresses of the client's choice ("proxy="), or keep what they are sent
# in memory without end ("component_server").
ROUTES = {"cancel", "heartbeat", "info", "queue", "reset", "startup-events", "theme.css", "upload", "upload_progress"}
DOCUMENTATION = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")  # which gradio adds
EVENT_BYTES = 1 << 18  # of what the page's controls say; pictures are uploaded before, and only named
UPLOADS = 8  # at the same time
UPLOADS_EACH = 3  # of one client
BODIES_EACH = 3  # of the largest size, of one client
BODIES = 16  # of the largest size, of all clients together
TEXT_BYTES = 1 << 16  # of a JSON text, without its pictures
PARTS = 4096  # commas, colons and brackets of a JSON text, which tell before it is parsed how many values it has
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing


class Door:
    """ASGI middleware that refuses

    - a host name that is not the server's: a page of another site can give its own name the server's address (DNS
      rebinding), and would then read what the server answers;
    - requests that change something and come from another site's page;
    - routes of gradio that the page does not need;
    - files that are named by what was not uploaded: gradio reads those of the server, and fetches those of the web;
    - uploads beyond what the disk is to hold: the oldest pictures are deleted.

    hosts:      names of the server, in lower case; None = any.
    folder:     of uploads.
    disk_bytes: most bytes in it.
    listening:  visitors to whom the page's events are being sent, kept up to date.

    Refusals are raised, for ``BodyLimit`` to answer.
    """

    def __init__(
        self,
        app: Any,
        hosts: frozenset[str] | None,
        folder: str,
        disk_bytes: int,
        listening: collections.Counter[str] | None = None,
    ):
        self.app, self.hosts, self.folder, self.disk_bytes = app, hosts, folder, disk_bytes
        self.listening = collections.Counter[str]() if listening is None else listening
        self.uploads = Shares("uploads", UPLOADS_EACH, UPLOADS, "others are uploading pictures")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.check_names(scope["method"], headers)
        path = scope["path"]
        if path in DOCUMENTATION:
            raise Refusal(404, "there is nothing at this address")
        if not path.startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        route = path.removeprefix(PREFIX).partition("/")[0]
        if route not in ROUTES and not (path.startswith(FILES) and holds(self.folder, path.removeprefix(FILES))):
            raise Refusal(404, "there is nothing at this address")
        if route == "upload":
            await self.upload(scope, receive, send)
        elif route == "queue" and scope["method"] not in SAFE:
            await self.event(scope, receive, send)
        elif path == EVENTS:
            await self.listen(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def check_names(self, method: str, headers: dict[str, str]) -> None:
        """Raises Refusal for another host, and for requests of other sites' pages that are not only read."""
        host = headers.get("host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            raise Refusal(
                421, f"{host_name(host)[:80]!r} is not a name of this server: its owner can add it to allowed_hosts"
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if method in SAFE or site in ("same-origin", "none"):
            return
        if site is None and (origin is None or self.is_own(origin, host, headers.get("x-forwarded-host"))):
            return  # no browser, or one that says nothing more because the address is not https
        raise Refusal(403, "this request comes from the page of another site")

    def is_own(self, origin: str, *hosts: str | None) -> bool:
        try:
            place = urlsplit(origin).netloc.lower()
        except ValueError:  # such as http://[::1
            return False
        return place in [host.lower() for host in hosts if host] or host_name(place) in (self.hosts or ())

    async def event(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on what the page's controls say, if the files that it names were uploaded."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client went away
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > EVENT_BYTES:
                raise Refusal(413, f"the settings have more than {EVENT_BYTES >> 10} KiB, the limit")
        paths = [part.get("path") for part in _parts_of(read_json(body)) if isinstance(part, dict)]  # gradio's files
        if not all(isinstance(path, str) and holds(self.folder, path) for path in paths if path is not None):
            raise Refusal(403, "only pictures that were uploaded can be used: upload this one")
        await self.make_room()
        waiting = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Any:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, again, send)

    async def listen(self, scope: Any, receive: Any, send: Any) -> None:
        """Send a visitor what its events give."""
        visitor = "".join(parse_qs(scope["query_string"].decode("latin-1")).get("session_hash", []))
        self.listening[visitor] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.listening[visitor] -= 1
            if not self.listening[visitor]:
                del self.listening[visitor]

    async def make_room(self) -> None:
        await asyncio.to_thread(make_room, self.folder, self.disk_bytes)

    async def upload(self, scope: Any, receive: Any, send: Any) -> None:
        with self.uploads.hold(address_of(scope)):
            await self.make_room()
            await self.app(scope, receive, send)


def read_json(body: bytes | bytearray, large: Collection[str] = ()) -> Any:
    """A JSON text. Refusal for one with too many parts, before it is parsed, and for one with too much text; InputError
    for anything else.

    large: keys of an object whose texts do not count: pictures.
    """
    if sum(body.count(mark) for mark in (b",", b":", b"[", b"{")) > PARTS:
        raise Refusal(413, f"the body has more than {PARTS} values, the limit")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise InputError("the body is not a JSON text") from None
    small = {name: value for name, value in values.items() if name not in large} if isinstance(values, dict) else values
    if sum(len(part) for part in _parts_of(small) if isinstance(part, str)) > TEXT_BYTES:
        raise Refusal(413, f"the body has more than {TEXT_BYTES >> 10} KiB beside pictures, the limit")
    return values


def _parts_of(values: Any) -> Iterator[Any]:
    """A JSON value with all keys and values in it."""
    waiting = [values]
    while waiting:
        yield (value := waiting.pop())
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def host_name(place: str) -> str:
    """The name in NAME:PORT, in lower case; of an IPv6 address without its brackets."""
    try:
        return urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return ""


class BodyLimit:
    """ASGI middleware: refuses a body that is too large or does not come in time, and further ones of clients that have
    too many under way, as soon as it is known."""

    def __init__(self, app: Any, most: int, seconds: float):
        self.app, self.most, self.seconds = app, most, seconds
        self.bodies = Shares("bodies", BODIES_EACH * most, BODIES * most, "others are sending large requests")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen, started, complete, client = 0, False, False, address_of(scope)
        deadline = asyncio.get_running_loop().time() + self.seconds

        async def limited() -> Any:
            nonlocal seen, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - asyncio.get_running_loop().time(), 0.0))
            except asyncio.TimeoutError:
                raise Refusal(408, f"the body must come within {self.seconds:g} s") from None
            size = len(message.get("body", b""))
            if seen + size > self.most:
                raise self._too_large()
            self.bodies.take(client, size)
            seen += size
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
        except InputError as error:
            if started:
                raise
            from fastapi.responses import JSONResponse

            await JSONResponse({"error": str(error)}, getattr(error, "status", 400))(scope, receive, send)
        finally:
            self.bodies.give_back(client, seen)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body has more than {self.most >> 20} MiB, the limit")
