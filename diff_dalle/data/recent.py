"""A bounded memory of what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Keeps the ``limit`` values used most recently. A copy sent to another process starts empty.

    dispose: called with each value that is let go.
    """

    def __init__(self, limit: int, dispose: Callable[[Value], None] | None = None):
        self.limit, self.dispose = limit, dispose
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under ``key``, made by ``make()`` if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = self._values[key] = make()
        while len(self._values) > self.limit:
            _, old = self._values.popitem(last=False)
            if self.dispose:
                self.dispose(old)
        return value

    def clear(self):
        while self._values:
            _, old = self._values.popitem()
            if self.dispose:
                self.dispose(old)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self):
        return Recent, (self.limit, self.dispose)
