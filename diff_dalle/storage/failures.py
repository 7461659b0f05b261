"""Failures of disks and networks: retries for temporary ones, clear messages for the others."""

from __future__ import annotations

import contextlib
import errno
import http.client
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import InputError

TRIES = 4
RETRY_SECONDS = 0.5  # doubled after each attempt
Result = TypeVar("Result")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUSY = (408, 429, 500, 502, 503, 504)
_STATUS: dict[int | None, type[OSError]] = {
    401: PermissionError,
    403: PermissionError,
    404: FileNotFoundError,
    410: FileNotFoundError,
}
_REASONS = {
    FileNotFoundError: "does not exist",
    NotADirectoryError: "is not a folder",
    IsADirectoryError: "is a folder, not a file",
    PermissionError: "cannot be read or written: permission denied",
}


def reraise(error: Exception):
    raise error


def pause(attempt: int):
    """Wait before the next attempt; ``attempt`` counts from 0."""
    time.sleep(RETRY_SECONDS * 2**attempt)


def retry(call: Callable[[], Result]) -> Result:
    """``call()``, repeated after a temporary failure: a lost connection or a busy server."""
    for attempt in range(TRIES - 1):
        try:
            return call()
        except urllib.error.HTTPError as error:
            if error.code not in _BUSY:
                raise
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError):
            pass
        pause(attempt)
    return call()


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of urllib, botocore or blobfile."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(error, "code", None) or getattr(error, "response_status", None)


def full_disk(error: BaseException | None) -> bool:
    """Whether an error is caused by a full disk or quota, which torch.save reports as a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_space(path: str) -> InputError:
    return InputError(f"{path} cannot be written: the disk is full or a quota is used up")


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn errors of an operation on ``path`` into an InputError that names the path and the reason."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        library = type(error).__module__.split(".")[0]  # by name: it may not be installed
        if not isinstance(error, OSError) and library not in ("botocore", "boto3", "blobfile", "http"):
            raise
        if full_disk(error):
            raise no_space(path) from error
        kind: type[Exception] = _STATUS.get(_status(error)) or type(error)
        reason = next((text for known, text in _REASONS.items() if issubclass(kind, known)), f"failed: {error}")
        raise InputError(f"{path} {reason}") from error
