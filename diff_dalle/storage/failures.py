"""Failures of disks and networks: which may pass, and clear messages for the others."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from collections.abc import Iterator

from ..config import InputError


class UnavailableError(InputError):
    """A remote file could not be read or written, although the attempt was repeated for ``RETRY_SECONDS``."""


class FailedCommandError(UnavailableError):
    """A command that ended with another status than 0."""


class ChangedError(InputError):
    """A file is not the one that was indexed, or that was read before: its size or its tag is another."""


class StatusError(OSError):
    """A reply of a web server that is not the file. wait: seconds after which it asks to be called again."""

    def __init__(self, code: int, reason: str, wait: str = ""):
        super().__init__(f"HTTP status {code}: {reason}")
        self.code, self.wait = code, wait


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BUSY = (408, 425, 429, 500, 502, 503, 504)
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
S3_ACCESS = (
    " (keys: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or aws configure; region: AWS_DEFAULT_REGION; another server "
    "than Amazon's: AWS_ENDPOINT_URL)"
)
# By name, since a library may not be installed: errors of urllib3 that tell of a lost connection.
_LOST = {"ProtocolError", "TimeoutError", "NewConnectionError", "SSLError", "ProxyError"}
_LOST |= {"HTTPClientError", "IncompleteReadError"}  # botocore
_LOST |= {"TimeoutException", "NetworkError", "RemoteProtocolError"}  # httpx, with which huggingface_hub works …
_LOST |= {"ConnectionError", "Timeout"}  # … and requests, with which its earlier versions do
_LIBRARIES = ("botocore", "boto3", "s3transfer", "blobfile", "urllib3", "http", "httpx", "httpx2", "requests")


def _library(error: BaseException) -> str:
    return type(error).__module__.split(".")[0]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error of a library, and those that it wraps."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        wrapped = getattr(inner, "reason", None) or getattr(inner, "kwargs", {}).get("error") or inner.__cause__
        if wrapped is None and _library(inner) in _LIBRARIES:
            wrapped = inner.__context__
        inner = wrapped if isinstance(wrapped, BaseException) else None


def _s3_code(error: BaseException) -> str:
    """What botocore calls an error; "" = it is none of S3's."""
    for each in _chain(error):
        if isinstance(response := getattr(each, "response", None), dict):
            return response.get("Error", {}).get("Code", "")
    return ""


def status_of(error: BaseException) -> int | None:
    """The HTTP status in an error of ours, botocore, blobfile or huggingface_hub; 0 = blobfile reached no server."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            if _s3_code(each) == "RequestTimeout":  # has the status 400
                return 408
            return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(status := getattr(response, "status_code", None), int):
            return status
        for name in ("code", "response_status"):
            if isinstance(status := getattr(each, name, None), int):
                return status
    return None


def is_temporary(error: BaseException) -> bool:
    """Whether an operation may succeed when it is repeated: after a lost connection, or from a busy server."""
    status = status_of(error)
    if status:
        return status in _BUSY
    found = list(_chain(error))
    for each in found:
        if isinstance(each, ssl.SSLCertVerificationError):
            return False
        if isinstance(each, socket.gaierror) and each.errno == socket.EAI_NONAME:  # a misspelled host
            return False
    return status == 0 or any(
        isinstance(each, (ConnectionError, TimeoutError, socket.gaierror, http.client.HTTPException))
        or (_library(each) in _LIBRARIES and not _LOST.isdisjoint(base.__name__ for base in type(each).__mro__))
        for each in found
    )


def full_disk(error: BaseException | None) -> bool:
    """Whether an error is caused by a full disk or quota, which torch.save reports as a RuntimeError."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def no_space(path: str) -> InputError:
    return InputError(f"{path} cannot be written: the disk is full or a quota is used up")


def reason_of(error: BaseException) -> str:
    """The first line of an error's innermost message."""
    text = str(list(_chain(error))[-1]).strip() or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _kind(error: BaseException) -> type[BaseException]:
    """The class of an error; of a web server's reply, that of the local error which means the same."""
    return _STATUS.get(status_of(error)) or type(error)


def is_missing(error: BaseException) -> bool:
    return issubclass(_kind(error), FileNotFoundError)


class explained:  # a class, like contextlib.suppress: a generator would cost more than what many reads do
    """Turn errors of an operation on ``path`` into an InputError that names the path and the reason."""

    def __init__(self, path: str):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, InputError):
            return
        if not isinstance(error, OSError) and _library(error) not in _LIBRARIES:
            return
        if full_disk(error):
            raise no_space(self.path) from error
        reason = next((text for known, text in _REASONS.items() if issubclass(_kind(error), known)), f"failed: {error}")
        if _s3_code(error) == "NoSuchBucket":
            reason = "is in a bucket that does not exist"
        refused = self.path.startswith("s3://") and status_of(error) in (None, 401, 403)
        raise InputError(f"{self.path} {reason}{S3_ACCESS if refused else ''}") from error
