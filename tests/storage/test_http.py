import io
import socket
import sys
import threading
import time

import pytest
import urllib3
from file_server import FileServer, unused_port
from refusing import refused

from diff_dalle import storage
from diff_dalle.storage import http, remote, retries

DATA = bytes(range(256)) * 4000  # 1 MB: more than one network buffer


def test_http_is_read_whole_and_by_byte_range(server):
    server.files["/a.bin"] = bytes(range(200))
    url = server.url("/a.bin")
    assert storage.exists(url) and not storage.exists(server.url("/b.bin"))
    assert storage.reads_by_offset(url) and storage.size_and_tag(url)[0] == 200
    assert storage.read_bytes(url) == bytes(range(200))
    assert storage.read_bytes(url, 10, 5) == bytes(range(10, 15))
    assert storage.read_bytes(url, 190, 50) == bytes(range(190, 200))
    assert storage.read_bytes(url, 500, 5) == b""
    assert storage.read_bytes(url, 0, 0) == b"" and storage.read_bytes(url, 200, 5) == b""
    server.files["/empty"] = b""
    assert storage.read_bytes(server.url("/empty")) == storage.read_bytes(server.url("/empty"), 0, 5) == b""
    assert storage.size_and_tag(server.url("/empty"))[0] in (-1, 0)
    server.ranges = False
    assert not storage.reads_by_offset(url)
    with refused("does not support byte ranges"):
        storage.read_bytes(url, 10, 5)


def test_a_server_may_be_away_for_a_while(monkeypatch, caplog):
    """Connections are refused until it is back; the log names it once, and that it is back."""
    port, started = unused_port(), []
    url = f"http://127.0.0.1:{port}/a.bin"

    def later():
        time.sleep(0.4)
        server = FileServer(port)
        server.files["/a.bin"] = DATA
        started.append(server)
        server.serve_forever(0.02)

    thread = threading.Thread(target=later, daemon=True)
    thread.start()
    monkeypatch.setattr(retries, "RETRY_SECONDS", 30.0)
    try:
        assert storage.read_bytes(url, 5, 7) == DATA[5:12]
    finally:
        while not started:
            time.sleep(0.01)
        started[0].shutdown()
        started[0].server_close()
    notes = [record.getMessage() for record in caplog.records if record.name == retries.__name__]
    assert len(notes) == 2 and "refused" in notes[0] and notes[1].endswith("answers again")


def test_a_server_that_stays_away_is_given_up_and_then_tried_once(monkeypatch):
    url = f"http://127.0.0.1:{unused_port()}/a.bin?token=secret"
    with pytest.raises(storage.UnavailableError, match=r"a\.bin\?\*\*\* is not available .*refused.*; tried \d+ times"):
        storage.read_bytes(url, 0, 5)
    monkeypatch.setattr(retries, "RETRY_SECONDS", 1e6)  # would never end
    with pytest.raises(storage.UnavailableError, match="tried once"):
        storage.read_bytes(url, 0, 5)


def test_a_server_that_was_given_up_and_answers_again_is_trusted_again(server):
    server.files["/a.bin"], server.busy = DATA, 10**6
    with pytest.raises(storage.UnavailableError):
        storage.read_bytes(server.url("/a.bin"), 0, 5)
    server.busy = 0
    assert storage.read_bytes(server.url("/a.bin"), 0, 5) == DATA[:5]
    server.busy = 2
    assert storage.read_bytes(server.url("/a.bin"), 0, 5) == DATA[:5]


def test_a_body_that_ends_early_without_an_error_goes_on_too():
    requests = []

    def request(start, end, tag):
        requests.append((start, end))
        return remote.Body(io.BytesIO(DATA[start : start + 1000]).read, lambda: None, start, (3500, ""))

    with remote.RemoteStream("http://host/a", request) as stream:
        assert stream.readall() == DATA[:3500]
    assert requests == [(0, None), (1000, None), (2000, None), (3000, None)]


def test_what_is_not_temporary_is_asked_once(server):
    for path, reason in (("/none", "none does not exist"), ("/secret", "permission denied")):
        with refused(reason):
            storage.read_bytes(server.url(path), 0, 5)
    assert server.requests == ["/none", "/secret"]
    with refused("failed"):
        storage.read_bytes("http://no-such-host.invalid/a")


@pytest.mark.parametrize("wait", ["0", "Sat, 01 Jan 2000 00:00:00 GMT", "soon", "3600"])
def test_retry_after_is_honored_within_the_total(server, wait, monkeypatch):
    """A wait beyond the total ends with one last attempt."""
    server.files["/a.bin"], server.busy, server.wait = DATA, 1, wait
    pauses = []
    monkeypatch.setattr(retries, "_wait", pauses.append)
    assert storage.read_bytes(server.url("/a.bin"), 1, 2) == DATA[1:3]
    (pause,) = pauses
    assert (0.9 < pause <= 1.0) if wait == "3600" else pause <= retries.FIRST_PAUSE


def test_a_body_that_breaks_off_goes_on_without_ranges_too(server):
    server.files["/a.bin"], server.cut, server.ranges = DATA, 5, False
    with storage.open_read(server.url("/a.bin")) as stream:
        assert b"".join(iter(lambda: stream.read(100_000), b"")) == DATA and server.cut == 0
    again = [headers["Range"] for headers in server.headers[1:]]
    assert len(again) == 5 and all(header and not header.startswith("bytes=0-") for header in again)


def test_progress_renews_the_time(server, monkeypatch):
    """Each connection breaks off, and the whole takes longer than the total for one failure."""
    server.files["/a.bin"], server.cut = DATA, 10**6
    clock = iter(range(10**9))
    monkeypatch.setattr(retries.time, "monotonic", lambda: next(clock) / 10)  # every look takes 0.1 s
    assert storage.read_bytes(server.url("/a.bin")) == DATA


def test_a_server_that_sends_no_header_is_given_up(monkeypatch):
    monkeypatch.setattr(http, "SILENT_SECONDS", 0.1)
    http._pool_of.cache_clear()
    try:
        with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(storage.UnavailableError):
            storage.read_bytes(f"http://127.0.0.1:{deaf.getsockname()[1]}/a", 0, 10)
    finally:
        http._pool_of.cache_clear()


@pytest.mark.parametrize("tags", [True, False])
def test_another_file_of_the_same_name_is_noticed(server, tags):
    """By its tag, which the server compares (412) or sends, or by its size."""
    server.files["/a.bin"], server.tags = DATA, tags
    url = server.url("/a.bin")
    state = storage.size_and_tag(url)
    assert storage.read_bytes(url, 10, 5, state) == DATA[10:15]
    server.files["/a.bin"] = DATA[1:] + (b"0" if tags else b"")
    with pytest.raises(storage.ChangedError, match=r"a\.bin has changed"):
        storage.read_bytes(url, 10, 5, state)
    server.files.clear()
    with pytest.raises(storage.ChangedError, match="was removed while it was in use"):
        storage.read_bytes(url, 10, 5, state)


def test_a_weak_tag_is_compared_here(server, monkeypatch):
    """A server must refuse every request that is conditional on one."""
    server.files["/a.bin"] = DATA
    with pytest.raises(storage.ChangedError):
        storage.read_bytes(server.url("/a.bin"), 0, 3, (len(DATA), 'W/"1"'))
    assert "If-Match" not in server.headers[0]


def test_a_file_that_changes_between_two_parts_is_not_glued(server, monkeypatch):
    server.files["/a.bin"] = DATA
    monkeypatch.setattr(remote, "RECEIVE", 1000)
    with storage.open_read(server.url("/a.bin")) as stream:
        stream.read(1000)
        stream._disconnect()  # as a lost connection does
        server.files["/a.bin"] = DATA[::-1]
        with pytest.raises(storage.ChangedError):
            stream.read(1000)


def test_connections_are_reused(server):
    server.files["/a.bin"] = DATA
    accepted, get_request = [], server.get_request
    server.get_request = lambda: accepted.append(1) or get_request()
    http._pool_of.cache_clear()
    for i in range(20):
        storage.read_bytes(server.url("/a.bin"), i, 5)
    assert len(accepted) == 1
    server.files["/b.bin"] = DATA
    for _ in range(3):
        storage.size_and_tag(server.url("/b.bin"))
    assert len(accepted) == 1


def test_a_url_may_hold_any_letters_and_a_user(server, monkeypatch):
    server.files["/%C3%BC%20%E7%8C%AB/a.bin"] = DATA
    url = server.url("/ü 猫/a.bin").replace("http://", "http://me:p%40ss@")
    assert storage.read_bytes(url, 0, 3) == DATA[:3]
    assert server.headers[-1]["Authorization"] == urllib3.make_headers(basic_auth="me:p@ss")["authorization"]
    monkeypatch.setitem(sys.modules, "idna", None)  # not everybody has it
    assert http._parsed("http://münchen.example:81/ä").url == "http://xn--mnchen-3ya.example:81/%C3%A4"
    for bad in ("http://[::1/a", "http:///a", "http://host:port/a"):
        with refused("is not a valid URL"):
            storage.read_bytes(bad)


def test_proxies_of_the_environment_are_used(server, monkeypatch):
    server.files["http://elsewhere.invalid/a"] = b"through the proxy"
    monkeypatch.setenv("http_proxy", server.url("").replace("http://", "http://me:word@"))
    monkeypatch.delenv("no_proxy", raising=False)
    assert storage.read_bytes("http://elsewhere.invalid/a") == b"through the proxy"
    assert server.headers[-1]["Proxy-Authorization"].startswith("Basic ")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server.files["/b"] = b"directly"
    assert storage.read_bytes(server.url("/b")) == b"directly"
