"""How much of the server one client may hold at a time: jobs, uploads, bytes of bodies. Who comes first cannot keep out
the others."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from .refusal import Refusal

#: Addresses without a share: everybody has them behind a proxy of this machine that does not forward its clients'.
SHARED = ("127.0.0.1", "::1")


class Shares:
    """Of one kind of thing. most: of it for each client."""

    def __init__(self, what: str, most: int):
        self.what, self.most = what, most
        self.held: collections.Counter[str] = collections.Counter()

    def take(self, client: str | None, count: int = 1) -> None:
        """Raises Refusal if the client would hold more than its share. client: its address, None = unknown."""
        if client is None or client in SHARED:
            return
        if self.held[client] + count > self.most:
            raise Refusal(503, f"busy, try again: {self.what} of your address are as many as it may have at a time")
        self.held[client] += count

    def give_back(self, client: str | None, count: int = 1) -> None:
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
