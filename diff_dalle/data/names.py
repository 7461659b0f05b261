"""Names from archives in messages."""

from __future__ import annotations

LONGEST_SHOWN = 200  # characters


def printable(name: str) -> str:
    """A name on one line: control characters are escaped, and a long name is shortened."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"
