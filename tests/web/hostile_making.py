"""Clients that cost a server as much as they can, from an address of their own. Usage, against a running server:

python tests/web/hostile_making.py ADDRESS CLIENTS SECONDS
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

from page_client import Visitor, send

SOURCE = "127.0.0.9"  # on Linux, all of 127.0.0.0/8 is this machine
CONNECTIONS = 50  # of each client at a time
HEAD = b"POST /api/sample HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
LONG = b"Content-Length: 1000000\r\n\r\n"


class FromSource(urllib.request.HTTPHandler):
    """Requests of urllib from that address."""

    def http_open(self, req):
        return self.do_open(functools.partial(http.client.HTTPConnection, source_address=(SOURCE, 0)), req)


def _hold(address: str, text: bytes, end: float) -> None:
    """Connections on which so much is sent, opened again when the server closes them."""
    place = urlsplit(address)
    target = str(place.hostname), int(place.port or 80)
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        while time.monotonic() < end:
            while len(held) < CONNECTIONS:
                try:
                    each = stack.enter_context(socket.create_connection(target, 5, (SOURCE, 0)))
                    each.setblocking(False)
                    each.send(text)
                    held.append(each)
                except OSError:
                    break
            time.sleep(0.5)
            held = [each for each in held if not _is_closed(each)]


def _is_closed(connection: socket.socket) -> bool:
    try:
        closed = not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        closed = True
    if closed:
        connection.close()
    return closed


def idle(address: str, end: float) -> None:
    """Connections without a request."""
    _hold(address, b"", end)


def half_open(address: str, end: float) -> None:
    """Heads that do not end."""
    _hold(address, HEAD, end)


def slow_bodies(address: str, end: float) -> None:
    """Bodies of which one byte comes."""
    _hold(address, HEAD + LONG + b"{", end)


def unread_events(address: str, end: float) -> None:
    """Events of the page whose results nobody reads."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError, urllib.error.URLError):
            Visitor(address).join("Sample", "click")
        time.sleep(0.5)


def many_keys(address: str, end: float) -> None:
    """Bodies of unknown keys, as large as they may be."""
    body = json.dumps({f"unknown_key_{i}": i for i in range(500_000)}).encode()
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            send(f"{address}/api/sample", body, Content_Type="application/json")


KINDS: tuple[Callable[[str, float], None], ...] = (idle, half_open, slow_bodies, unread_events, many_keys)


def main() -> None:
    address, clients, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    urllib.request.install_opener(urllib.request.build_opener(FromSource))
    end = time.monotonic() + seconds
    for i in range(clients):  # of each kind in turn
        threading.Thread(target=KINDS[i % len(KINDS)], args=(address, end)).start()


if __name__ == "__main__":
    main()
