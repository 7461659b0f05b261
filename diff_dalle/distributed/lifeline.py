"""How the processes of a job notice each other's end.

Rank 0 listens; every other rank keeps one connection to it, over which both sides send a line every few seconds. The
connections of a killed process are closed by its operating system, so its end is seen at once; a stopped process, or
one on a lost machine, is named after ``silence`` seconds without a line. A rank that fails says why. The first news of
any rank goes to all.

A thread does this, beside whatever the main thread waits for. It therefore cannot see a rank whose main thread alone
hangs: that takes the time-out of a collective.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from .rendezvous import ProcessInfo

if TYPE_CHECKING:
    import torch

BEAT_SECONDS = 2.0  # between two lines
MAX_SILENCE = 120.0  # seconds: a machine that swaps, or an interpreter in a long call of C code, may be silent for some
LONGEST_LINE = 2**20  # bytes


@dataclass(frozen=True)
class News:
    """Why the job ends. rank: the first that failed; reason: a clause that names it; told: whether that rank said so
    itself, instead of vanishing."""

    rank: int
    reason: str
    told: bool


class _Peer:
    """One connection. rank: of the other side, -1 = not yet known; silent: seconds without a line from it."""

    def __init__(self, connection: socket.socket, rank: int = -1):
        self.connection, self.rank, self.silent, self.rest = connection, rank, 0.0, b""
        connection.settimeout(BEAT_SECONDS)  # of sending: the buffers of a stopped process may be full

    def send(self, **message) -> None:
        with contextlib.suppress(OSError):  # the end of a connection is noticed in reading
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict]:
        """The messages that have arrived. EOFError at the end of the connection, and for anything but messages."""
        try:
            data = self.connection.recv(2**16)
            *lines, self.rest = (self.rest + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            raise EOFError from None
        if not data or len(self.rest) > LONGEST_LINE or not all(isinstance(each, dict) for each in messages):
            raise EOFError
        self.silent = 0.0
        return messages


class Lifeline:
    """This rank's end of it, and its thread.

    address: rank 0's host.
    store:   of texts that all ranks can read, for rank 0's port.
    seconds: how long to try to reach rank 0.
    silence: seconds after which a process that gives no sign of life is named.
    on_news: called in the thread, once, when another rank ends the job.

    OSError when rank 0 cannot be reached.
    """

    def __init__(
        self,
        place: ProcessInfo,
        address: str,
        store: torch.distributed.Store,
        seconds: float,
        silence: float,
        on_news: Callable[[News], None],
    ):
        self.rank, self.silence, self.on_news = place.rank, silence, on_news
        self.beat = min(BEAT_SECONDS, silence / 4)
        self.missing = set(range(1, place.size)) if self.rank == 0 else set()
        self.news: News | None = None
        self._arrived, self._known, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.RLock()
        self._selector, self._peers = selectors.DefaultSelector(), set[_Peer]()
        self._server: socket.socket | None = None
        if self.rank == 0:
            self._server, self._secret = _listen(address, place.size), secrets.token_hex(8)
            self._selector.register(self._server, selectors.EVENT_READ)
            store.set("lifeline", f"{self._server.getsockname()[1]} {self._secret}")
        else:
            port, secret = store.get("lifeline").decode().split()
            hub = _Peer(socket.create_connection((address, int(port)), seconds), 0)
            hub.send(secret=secret, rank=self.rank)
            self._add(hub)
        self._thread = threading.Thread(target=self._run, name="lifeline", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- for the main thread

    def wait_for_all(self, seconds: float) -> list[int]:
        """On rank 0, wait until every rank is connected; the ranks that are not after ``seconds``."""
        if self.missing:
            self._arrived.wait(seconds)
        return sorted(self.missing)

    def report(self, reason: str) -> News | None:
        """Tell all ranks that this one fails. The job's first news, perhaps another rank's; None when rank 0, which
        decides, does not answer."""
        news = News(self.rank, reason, told=True)
        if self.rank == 0:
            self._tell(news)
        else:
            with self._lock:
                for peer in self._peers:
                    peer.send(news=asdict(news))
        return self.wait_for_news(2 * BEAT_SECONDS)

    def wait_for_news(self, seconds: float) -> News | None:
        self._known.wait(seconds)
        return self.news

    def close(self) -> None:
        """This rank has ended well: the others no longer watch it."""
        self._ended.set()
        self._thread.join(4 * BEAT_SECONDS)  # bounded, as everything here
        with self._lock:
            for peer in self._peers:
                peer.send(bye=True)
                peer.connection.close()
        if self._server:
            self._server.close()

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        due = time.monotonic() + self.beat
        while not self._ended.is_set():
            for key, _ in self._selector.select(min(0.2, self.beat)):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() >= due:
                due = time.monotonic() + self.beat
                self._breathe()

    def _breathe(self) -> None:
        """Send a line to every peer, and name the silent ones. A pause of this process itself counts as one beat."""
        for peer in list(self._peers):
            peer.send()
            peer.silent += self.beat
            if peer.silent > self.silence:
                self._lose(peer, f"has given no sign of life for {self.silence:g} s: it was stopped, or cut off")

    def _accept(self) -> None:
        assert self._server
        with contextlib.suppress(OSError):
            self._add(_Peer(self._server.accept()[0]))

    def _read(self, peer: _Peer) -> None:
        try:
            messages = peer.receive()
        except EOFError:
            self._lose(peer, "is gone: it was killed, or its machine was lost")
            return
        for message in messages:
            if peer.rank < 0:
                if message.get("secret") != self._secret or message.get("rank") not in self.missing:
                    self._drop(peer)
                    return
                peer.rank = message["rank"]
                self.missing.discard(peer.rank)
                if not self.missing:
                    self._arrived.set()
            elif message.get("bye"):
                self._drop(peer)
            elif message.get("news"):
                self._tell(News(**message["news"]))

    def _lose(self, peer: _Peer, reason: str) -> None:
        self._drop(peer)
        if peer.rank >= 0 and not self._ended.is_set():
            self._tell(News(peer.rank, f"rank {peer.rank} {reason}", told=False))

    def _tell(self, news: News) -> None:
        """Keep the first news; rank 0 passes it on to all."""
        with self._lock:
            if self.news is not None:
                return
            self.news = news
            if self.rank == 0:
                for peer in self._peers:
                    peer.send(news=asdict(news))
        self._known.set()
        if news.rank != self.rank:
            self.on_news(news)

    def _add(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.add(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.discard(peer)
            self._selector.unregister(peer.connection)
            peer.connection.close()


def _listen(address: str, size: int) -> socket.socket:
    """A free port: of the loopback interface if ``address`` is one, else of all interfaces."""
    if address == "127.0.0.1":
        return socket.create_server((address, 0), backlog=size)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=both)
