"""What refused settings are told, without the places of the settings in their files."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

import pytest

from diff_dalle.checkpoints.content import DamagedError
from diff_dalle.config import InputError


@contextlib.contextmanager
def refused(pattern: str, kind: type[InputError] = InputError) -> Iterator[list[str]]:
    """The block raises an InputError that a pattern matches; the list gets its message. kind: of the error."""
    message: list[str] = []
    with pytest.raises(kind) as error:
        yield message
    message.append(re.sub(r" \([^()]*, line \d+\)", "", str(error.value)))
    assert re.search(pattern, message[0]), message[0]


damaged = functools.partial(refused, kind=DamagedError)
