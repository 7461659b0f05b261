"""What refused settings are told, without the places of the settings in their files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from diff_dalle.config import InputError


@contextlib.contextmanager
def refused(pattern: str) -> Iterator[list[str]]:
    """The block raises an InputError that a pattern matches; the list gets its message."""
    message: list[str] = []
    with pytest.raises(InputError) as error:
        yield message
    message.append(re.sub(r" \([^()]*, line \d+\)", "", str(error.value)))
    assert re.search(pattern, message[0]), message[0]
