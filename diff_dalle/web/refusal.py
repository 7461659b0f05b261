"""Why a request is refused: an InputError says what is wrong with it, a Refusal why it is not served although it may be
right. Such as that its client holds its share of the server already: who comes first cannot keep out the others."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..config import InputError


class Refusal(InputError):
    """A request that is not served; ``status`` is that of HTTP. Any other InputError about a request has 400."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


#: Addresses without a share: everybody has them behind a proxy of this machine that does not forward its clients'.
SHARED = ("127.0.0.1", "::1")


class Shares:
    """Of one kind of thing. most: of it for each client. all: of it for all clients together, and busy:
    what keeps these from more."""

    def __init__(self, what: str, most: int, all: float = math.inf, busy: str = ""):
        self.what, self.most, self.all, self.busy, self.total = what, most, all, busy, 0
        self.held: collections.Counter[str] = collections.Counter()

    def take(self, client: str | None, count: int = 1) -> None:
        """Raises Refusal if the client would hold more than its share, or all together more than there is. client: its
        address, None = unknown."""
        if self.total + count > self.all:
            raise Refusal(503, f"busy, try again: {self.busy}")
        if client is not None and client not in SHARED:
            if self.held[client] + count > self.most:
                raise Refusal(503, f"busy, try again: {self.what} of your address are as many as it may have at a time")
            self.held[client] += count
        self.total += count

    def give_back(self, client: str | None, count: int = 1) -> None:
        self.total -= count
        if client is not None and client in self.held:
            self.held[client] -= count
            if self.held[client] <= 0:
                del self.held[client]

    @contextlib.contextmanager
    def hold(self, client: str | None) -> Iterator[None]:
        """One of them, for as long as the context lasts. Raises Refusal as ``take``."""
        self.take(client)
        try:
            yield
        finally:
            self.give_back(client)


def address_of(scope: Mapping[str, Any]) -> str | None:
    """The client's address in an ASGI scope."""
    client = scope.get("client")
    return client[0] if client else None
