"""http and https through urllib3, with pooled connections: whole files, and byte ranges if the server supports them."""

from __future__ import annotations

import functools
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

import urllib3

from ..config import InputError
from .failures import StatusError
from .paths import State
from .remote import Body, ReadOnly, RemoteReader, beyond_end, byte_range
from .retries import CONNECT_SECONDS, SILENT_SECONDS

CONNECTIONS = 32  # per server, kept open
HEADERS = {"User-Agent": "diff_dalle", "Accept-Encoding": "identity"}  # ranges count the bytes of the file itself
BEYOND = 416  # the status of a range that starts after the end


@functools.cache
def _pool_of(process: int, proxy: str) -> urllib3.PoolManager:
    """One pool per process, since a forked copy of a connection must not be used."""
    options: dict[str, Any] = {
        "maxsize": CONNECTIONS,
        "timeout": urllib3.Timeout(connect=CONNECT_SECONDS, read=SILENT_SECONDS),
        # Redirections only: failures are repeated by ``retries``.
        "retries": urllib3.Retry(None, connect=0, read=0, status=0, other=0, redirect=10),
    }
    if not proxy:
        return urllib3.PoolManager(**options)
    user = urllib3.util.parse_url(proxy).auth
    headers = urllib3.make_headers(proxy_basic_auth=urllib.parse.unquote(user)) if user else None
    return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)


def _parsed(path: str) -> urllib3.util.Url:
    """The parts of a URL, percent-encoded where characters must not occur in it; the host has its own encoding."""
    try:
        parts = urllib.parse.urlsplit(path)
        host = parts.hostname or ""
        if not host.isascii():
            user, at, _ = parts.netloc.rpartition("@")
            port = f":{parts.port}" if parts.port is not None else ""
            path = parts._replace(netloc=f"{user}{at}{host.encode('idna').decode()}{port}").geturl()
        url = urllib3.util.parse_url(path)
    except (ValueError, urllib3.exceptions.LocationParseError):
        url = urllib3.util.Url()
    if not url.host:
        raise InputError(f"{path} is not a valid URL")
    return url


def _get(path: str, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
    """An open reply. Raises StatusError unless it is the file, or a range of it, or BEYOND."""
    url = _parsed(path)
    user = urllib3.make_headers(basic_auth=urllib.parse.unquote(url.auth)) if url.auth else {}
    proxy = "" if urllib.request.proxy_bypass(url.host or "") else urllib.request.getproxies().get(url.scheme or "", "")
    reply = _pool_of(os.getpid(), proxy).request(
        "GET",
        url._replace(auth=None).url,
        headers={**HEADERS, **user, **headers},
        preload_content=False,
        decode_content=False,
    )
    if reply.status not in (200, 206, BEYOND):
        reply.close()
        raise StatusError(reply.status, reply.reason or "", reply.headers.get("Retry-After", ""))
    return reply


def _state(reply: urllib3.BaseHTTPResponse) -> State:
    """Size and tag of the whole file, from the headers of a reply."""
    total = reply.headers.get("Content-Length" if reply.status == 200 else "Content-Range", "")
    total = total.rpartition("/")[2]  # of ``bytes 0-0/12345``
    return int(total) if total.isdigit() else -1, reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""


class Http(RemoteReader, ReadOnly):
    def _first_byte(self, path: str) -> tuple[bool, State]:
        """Whether byte ranges are supported, and the file's state. With GET, since some servers reject HEAD."""
        reply = _get(path, {"Range": "bytes=0-0"})
        if reply.status == 206:
            reply.read()
        reply.close()  # the connection is in its pool again if all was read
        return reply.status != 200, _state(reply)

    def size_and_tag(self, path: str) -> State:
        return self._first_byte(path)[1]

    def by_offset(self, path: str) -> bool:
        return self._first_byte(path)[0]

    def request(self, path: str, start: int, end: int | None, tag: str) -> Body:
        headers = byte_range(start, end)
        if tag.startswith('"'):  # a strong tag: the server refuses to send a part of another version
            headers["If-Match"] = tag
        reply = _get(path, headers)
        first = reply.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
        begin = 0 if reply.status == 200 else int(first) if first.isdigit() else start
        if reply.status == BEYOND:
            reply.close()
            return beyond_end(start, _state(reply))
        return Body(reply.read1, reply.close, begin, _state(reply))
