"""Names that a user may misspell."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from .errors import InputError

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint ``; did you mean X?`` for a misspelled name, or an empty string."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """``table[name]``, or an InputError that lists the known names. ``what`` says what the name is of."""
    if name not in table:
        raise InputError(f"{what} {name!r} is unknown{nearest(name, table)} (known: {', '.join(table)})")
    return table[name]
