"""A bounded cache of recently used values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Keeps the ``limit`` most recently used values. Thread-safe. A copy sent to another process starts empty."""

    def __init__(self, limit: int):
        self.limit = limit
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under ``key``; ``make()`` creates it when it is missing."""
        with self._lock:
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
