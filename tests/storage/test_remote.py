"""What http and s3 have in common: lost connections, and servers that are busy, away or silent."""

import pytest
from refusing import refused

from diff_dalle import storage
from diff_dalle.storage import http, objects, retries

DATA = bytes(range(256)) * 4000  # 1 MB: more than one network buffer


@pytest.fixture(params=["http", "s3"])
def url(request, server, s3_at):
    server.files["/bucket/a"] = DATA
    s3_at(server.url(""))
    return "s3://bucket/a" if request.param == "s3" else server.url("/bucket/a")


def test_a_body_that_breaks_off_goes_on_where_it_ended(server, url):
    server.cut = 5
    assert storage.read_bytes(url) == DATA and server.cut == 0 and server.sent == len(DATA)
    again = [headers["Range"] for headers in server.headers[1:]]
    assert again == [f"bytes={start}-" for start in (512_000, 768_000, 896_000, 960_000, 992_000)]
    assert server.headers[1]["If-Match"]  # of the same version


def test_a_file_that_has_become_shorter_is_named(server, url):
    """The reply to a range after its end does not say what its size is."""
    server.files["/bucket/a"] = DATA[:500]
    with pytest.raises(storage.ChangedError, match="a has changed: it ends before byte 600$"):
        storage.read_bytes(url, 600, 10, (len(DATA), ""))
    assert storage.read_bytes(url, 600, 10) == b"" == storage.read_bytes(url, 500, 10, (500, ""))


def test_a_third_of_refused_requests_does_no_harm(server, url):
    server.busy_share = 0.3
    for i in range(60):
        assert storage.read_bytes(url, i, 3) == DATA[i : i + 3]
    assert len(server.requests) > 70


def test_a_server_that_is_away_for_too_long_is_given_up(server, url):
    server.busy_share = 1.0
    with pytest.raises(storage.UnavailableError, match=r"bucket/a is not available .*503"):
        storage.read_bytes(url, 0, 5)
    server.busy_share = 0.0
    server.requests.clear()
    with refused("none does not exist"):
        storage.read_bytes(f"{url}none", 0, 5)
    assert len(server.requests) == 1  # what is not temporary is asked once


def test_a_silent_server_is_given_up(server, url, monkeypatch):
    for module in (http, objects):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
        monkeypatch.setattr(module, "CONNECTIONS", 1)
    objects._client_of.cache_clear()
    http._pool_of.cache_clear()
    server.silent = True
    config = objects._client().meta.config
    assert (config.connect_timeout, config.read_timeout) == (retries.CONNECT_SECONDS, 0.1)
    try:
        with pytest.raises(storage.UnavailableError, match=r"[Tt]imed? ?out"):
            storage.read_bytes(url, 0, 10)
    finally:
        http._pool_of.cache_clear()
