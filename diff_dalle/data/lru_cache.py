"""A bounded memory of what was used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Keeps the ``limit`` values used most recently. A copy sent to another process starts empty."""

    def __init__(self, limit: int):
        self.limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under ``key``, made by ``make()`` if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
        else:
            self._values[key] = make()
            if len(self._values) > self.limit:
                self._values.popitem(last=False)
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self):
        return LRUCache, (self.limit,)
