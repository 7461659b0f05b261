"""No small request costs much, and no client keeps out the others."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from page_client import Visitor, send
from web_making import Gate, call, client_of, make_service, needs_web, serving

from diff_dalle.commands.serve import Limits
from diff_dalle.config import InputError
from diff_dalle.web import door, page, server
from diff_dalle.web.api import create_app
from diff_dalle.web.door import PARTS, TEXT_BYTES, BodyLimit, read_json
from diff_dalle.web.refusal import Refusal, Shares

pytestmark = needs_web


@pytest.fixture(scope="module")
def service(files):
    made = make_service(files["base"], Limits(max_body=1, max_queue=2))
    yield made
    made.close()


def test_values_are_counted_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr(door.json, "loads", lambda _: pytest.fail("parsed"))
    many = [b"[" * PARTS * 2, b"[" + b"0," * PARTS + b"0]", b"{" + b'"a":0' * PARTS + b"}", b"[[],[]]" * PARTS]
    for body in many:
        with pytest.raises(Refusal, match="values, the limit"):
            read_json(body)


def test_texts_are_limited_but_for_pictures():
    long = "x" * (TEXT_BYTES + 1)
    for value in ({"prompt": long}, {long: 1}, [[{"a": [long]}]], long):
        with pytest.raises(Refusal, match="64 KiB beside pictures"):
            read_json(json.dumps(value).encode(), ("mask",))
    assert read_json(json.dumps({"mask": long}).encode(), ("mask",)) == {"mask": long}
    with pytest.raises(Refusal):
        read_json(json.dumps({"mask": long}).encode())


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({f"key{i}": 1 for i in range(2000)}, 400, "10 settings are wrong"),
        ({f"key{i}": 1 for i in range(5000)}, 413, "values, the limit"),
        ({"seed": 10**400}, 400, "seed"),
        ({"init_image": [[[[1]]]]}, 400, "base64"),
        ({"prompt": "a \ud800 star"}, 400, "prompt is"),
        ({"negative_prompt": "a \0 star"}, 400, "must not hold a NUL character"),
        ({"model": "\ud800"}, 400, "model"),
        ({"lora": ["\ud800"]}, 400, "lora"),
    ],
)
def test_strange_bodies_are_refused_in_few_words(body, status, words, service):
    answer = client_of(service).post(
        "/api/sample", content=json.dumps(body), headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert answer.status_code == status and words in answer.json()["error"], answer.text
    assert len(answer.text) < 4000


def test_a_place_is_taken_when_the_body_is_there(service):
    """Requests whose bodies do not come keep nobody out."""
    taken = []
    part = {"type": "http.request", "body": b"{", "more_body": True}

    class Watched:
        async def __call__(self, scope, receive, send):
            async def listened():
                taken.append(len(service.worker._waiting))
                return await receive()

            await create_app(service)(scope, listened, send)

    assert call(BodyLimit(Watched(), 100, 0.05), part)[0] == 408
    assert taken and not any(taken)


def test_a_full_queue_refuses_before_the_body_is_read(service, monkeypatch):
    def full():
        raise Refusal(503, "busy")

    monkeypatch.setattr(service.worker, "check_room", full)
    read = []

    async def app(scope, receive, send):
        await create_app(service)(scope, lambda: read.append(1), send)

    assert call(app)[0] == 503 and not read


def test_one_client_has_a_share():
    shares = Shares("requests", 2)
    with shares.hold("10.0.0.1"), shares.hold("10.0.0.1"):
        with pytest.raises(Refusal, match="requests of your address"), shares.hold("10.0.0.1"):
            pass
        with shares.hold("10.0.0.2"):
            assert set(shares.held) == {"10.0.0.1", "10.0.0.2"}
        for _ in range(5):
            shares.take("127.0.0.1")  # a proxy's
            shares.take(None)
    assert not shares.held and shares.total == 10


def test_jobs_of_one_client_leave_places_for_others(service):
    gate = Gate()
    service.worker.submit(gate)
    assert gate.started.wait(10)
    service.jobs_each.take("10.0.0.1")  # max_queue 2: one each
    app = create_app(service)
    body = {"type": "http.request", "body": b'{"prompt": "a star", "steps": 1}', "more_body": False}

    def ask(client):
        async def of(scope, receive, send):
            await app({**scope, "client": (client, 1)}, receive, send)

        return call(of, body, {"type": "http.disconnect"})

    try:
        assert ask("10.0.0.1")[0] == 503
        assert ask("10.0.0.2") == (499, {"error": "the client went away"})
        assert not service.jobs_each.held["10.0.0.2"]
    finally:
        service.jobs_each.give_back("10.0.0.1")
        gate.open.set()


def test_bodies_under_way_are_limited():
    async def reads(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        raise InputError("read")

    limit = BodyLimit(reads, 100, 5)
    part = {"type": "http.request", "body": bytes(60), "more_body": False}
    bodies, client = limit.bodies, "10.0.0.1"

    async def from_client(scope, receive, send):
        await limit({**scope, "client": (client, 1)}, receive, send)

    assert call(from_client, part) == (400, {"error": "read"}) and not bodies.total and not bodies.held
    bodies.total = most = door.BODIES * 100 - 50
    status, answer = call(from_client, part)
    assert (status, answer) == (503, {"error": "busy, try again: others are sending large requests"})
    assert bodies.total == most
    bodies.total = bodies.held[client] = most = door.BODIES_EACH * 100 - 50
    status, answer = call(from_client, part)
    assert status == 503 and "bodies of your address" in answer["error"] and bodies.held[client] == most


def test_the_job_of_a_visitor_who_does_not_listen_is_canceled(address, service, monkeypatch):
    monkeypatch.setattr(page, "ABSENT_SECONDS", 0.2)
    gate = Gate()
    service.worker.submit(gate)
    assert gate.started.wait(10)
    visitor = Visitor(address)
    assert visitor.join("Sample", "click")[0] == 200
    wait_for(lambda: len(service.worker._waiting) == 1)
    wait_for(lambda: not service.worker._waiting)
    gate.open.set()


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def connect(address, text):
    place = socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
    place.settimeout(30)
    place.sendall(text)
    return place


@pytest.mark.parametrize("head", [b"", b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "])
def test_connections_without_a_request_are_closed(head, service, monkeypatch):
    import uvicorn

    config = uvicorn.Config
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(uvicorn, "Config", lambda app, **given: config(app, http=server.protocol(), **given))
    with serving(service, create_app(service)) as here:
        with connect(here, head) as place:
            assert place.recv(100) == b""
        request = b"GET /api/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with connect(here, request) as place:  # and then begins another, which does not go on
            assert b"200 OK" in place.recv(10_000)
            place.sendall(request[:20])
            rest = b"".join(iter(lambda: place.recv(10_000), b""))
            assert b"HTTP/1.1" not in rest


class Transport:
    """Of a connection from an address of its own, which ends when the loop comes to it."""

    def get_extra_info(self, name):
        return {"peername": ("127.0.0.9", 1), "sockname": ("127.0.0.1", 2)}.get(name)

    def abort(self):
        pass


def test_refused_connections_do_not_count(monkeypatch):
    """A burst of them would reach the limit of all connections, and others would be refused too."""
    import uvicorn
    from uvicorn.server import ServerState

    async def connect():
        state, kind = ServerState(), server.protocol()
        config = uvicorn.Config(lambda scope: None, lifespan="off")
        made = [kind(config, state, {}) for _ in range(4)]
        for each in made:
            each.connection_made(Transport())
            each.waiting.cancel()
        return made, state.connections

    monkeypatch.setattr(server, "CONNECTIONS_EACH", 2)
    made, counted = asyncio.run(connect())
    assert counted == {*made[:2]}


def test_connections_of_one_client_are_limited(service, monkeypatch):
    import uvicorn

    monkeypatch.setattr(server, "CONNECTIONS_EACH", 2)
    config = uvicorn.Config
    monkeypatch.setattr(uvicorn, "Config", lambda app, **given: config(app, http=server.protocol(), **given))
    with serving(service, create_app(service)) as here:
        target, request = ("127.0.0.1", int(here.rpartition(":")[2])), b"GET /api/models HTTP/1.1\r\nHost: a\r\n\r\n"
        others = [socket.create_connection(target, 30, ("127.0.0.9", 0)) for _ in range(2)]
        another = socket.create_connection(target, 30, ("127.0.0.9", 0))
        with another as place, contextlib.suppress(ConnectionError):  # by when the server closes it
            place.sendall(request)
            assert not place.recv(100)
        with socket.create_connection(target, 30) as place:
            place.sendall(request)
            assert b"200 OK" in place.recv(10_000)
        others.pop().close()
        time.sleep(0.2)
        with socket.create_connection(target, 30, ("127.0.0.9", 0)) as place:
            place.sendall(request)
            assert b"200 OK" in place.recv(10_000)
        others.pop().close()


def test_an_origin_that_is_no_url_is_another_site(address):
    status, _ = send(f"{address}/api/sample", b"{}", Content_Type="application/json", Origin="http://[::1")
    assert status == 403
