"""hf://USER/NAME/FILE and hf://USER/NAME@REVISION/FILE: files of the Hugging Face hub through huggingface_hub, the
extra ``hub``, which keeps what is read in its cache.

A login or HF_TOKEN gives access, HF_ENDPOINT selects another server, HF_HUB_OFFLINE=1 allows the cache only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import unquote

from ..config import InputError
from .failures import ChangedError, explained, is_temporary, status_of
from .local import ReadBySeeking
from .paths import UNKNOWN, FileInfo, State, stays_inside
from .retries import SILENT_SECONDS, retry

_NAME = r"[\w-][\w.-]{0,95}"
_PLACE = re.compile(rf"hf://({_NAME}/{_NAME})(?:@([\w.%-]+))?(?:/(.*))?", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Place:
    """What a path means. revision: a branch, tag or commit; None = the main branch. name: of a file or folder in the
    repository; "" = all of it."""

    repo: str
    revision: str | None
    name: str

    @classmethod
    def of(cls, path: str) -> Place:
        """InputError for anything but hf://USER/NAME[@REVISION][/FILE]."""
        found = _PLACE.fullmatch(path)
        name = (found[3] or "").rstrip("/") if found else ""
        if found is None or (name and not (name.isprintable() and stays_inside(name))):
            raise InputError(
                f"{path} must be hf://USER/NAME, or hf://USER/NAME@REVISION, and can end with the path of a file there"
            )
        return cls(found[1], unquote(found[2]) if found[2] else None, name)


def server() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def hub_module() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise InputError("hf:// paths need huggingface_hub: pip install 'diff_dalle[hub]'") from None


def hub_api(token: str | None = None) -> Any:
    """The client. token: None = that of the login or HF_TOKEN."""
    hub = hub_module()
    # The client has no time-out of its own. Asked for each time, since it is replaced after some errors.
    hub.get_session().timeout = SILENT_SECONDS
    return hub.HfApi(server(), token=token)


@contextlib.contextmanager
def _translated(path: str, place: Place) -> Iterator[None]:
    """Turn the client's errors into those that other storage raises."""
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        # The second has FileNotFoundError as a base, but says that the first, or something else, was in the way.
        cause = error.__cause__
        if isinstance(error, errors.LocalEntryNotFoundError) and not isinstance(
            cause, (errors.OfflineModeIsEnabled, type(None))
        ):
            raise cause from None
        raise InputError(f"{path} is not in the client's cache, and HF_HUB_OFFLINE forbids to ask {server()}") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{path}: the repository {place.repo} has no revision {place.revision}") from None
    except errors.RemoteEntryNotFoundError:
        raise FileNotFoundError(path) from None
    except errors.GatedRepoError:
        page = f"{server()}/{place.repo}"
        raise InputError(f"{path}: {place.repo} is open to those who have asked for access only: see {page}") from None
    except errors.RepositoryNotFoundError:
        see = "that this login may see" if hub_module().get_token() else "that is visible without `hf auth login`"
        raise InputError(f"{path}: {server()} has no repository {place.repo} {see}: check its name") from None
    except (errors.HfHubHTTPError, ValueError) as error:  # of the second kind are names and cards that it refuses
        if isinstance(error, InputError) or is_temporary(error) or status_of(error) in (401, 403):
            raise
        raise InputError(f"{path}: {server()} refuses it: {' '.join(str(error).split())}") from None


class Hub(ReadBySeeking):
    def _file(self, path: str) -> str:
        """The local copy of a file."""
        place = Place.of(path)
        if not place.name:
            raise InputError(f"{path} is a repository, but a file is required here: add /FILE")
        hub_api()
        with _translated(path, place):
            return hub_module().hf_hub_download(
                place.repo, place.name, revision=place.revision, endpoint=server(), etag_timeout=SILENT_SECONDS
            )

    def exists(self, path: str) -> bool:
        try:
            if Place.of(path).name:
                self._file(path)
                return True
            return next(self.list_files(path, True), None) is not None
        except FileNotFoundError:
            return False

    def list_files(self, folder: str, recursive: bool) -> Iterator[FileInfo]:
        place = Place.of(folder)
        root = folder[: len(folder) - len(place.name)].rstrip("/") if place.name else folder.rstrip("/")
        with _translated(folder, place):
            found = hub_api().list_repo_tree(
                place.repo, place.name or None, recursive=recursive, revision=place.revision
            )
            for entry in found:
                if not hasattr(entry, "blob_id"):
                    continue  # a folder
                if not (entry.path.isprintable() and stays_inside(entry.path)):
                    raise InputError(
                        f"{folder} lists a file named {entry.path[:80]!r}, which would lie elsewhere: do not use it"
                    )
                tag = entry.lfs.sha256 if entry.lfs else entry.blob_id  # as the cache names its content
                yield FileInfo(f"{root}/{entry.path}", entry.size, tag)

    def size_and_tag(self, path: str) -> State:
        local = os.path.realpath(self._file(path))
        return os.path.getsize(local), os.path.basename(local)  # the cache names contents by their hashes

    def open_read(self, path: str, state: State) -> BinaryIO:
        if state != UNKNOWN and state != (found := retry(path, lambda: self.size_and_tag(path))):
            raise ChangedError(f"{path} has changed: its size and tag were {state}, but are {found}")
        return open(retry(path, lambda: self._file(path)), "rb")

    def make_dirs(self, folder: str):
        """Nothing: folders come with their files."""

    def put(self, local: str, path: str):
        place = Place.of(path)
        commit(path[: len(path.rstrip("/")) - len(place.name)].rstrip("/"), {place.name: local})

    def remove(self, path: str):
        place = Place.of(path)
        with _translated(path, place):
            hub_api().delete_file(place.name, place.repo, revision=place.revision)


def commit(
    folder: str,
    files: Mapping[str, str],
    private: bool = True,
    message: str = "",
    stale: Callable[[], Iterable[str]] = tuple,
) -> None:
    """Put local files into a repository in one commit, which nobody sees half.

    folder: hf://USER/NAME, or with @REVISION a branch. A repository that is missing is made, private or not.
    files:  local paths by names there.
    stale:  names there of what the commit removes; called when the repository exists.

    What an interrupted call has sent is not sent again.
    """
    place = Place.of(folder)
    if place.name:
        raise InputError(f"{folder} is a folder in a repository, but a whole one is required here: hf://USER/NAME")
    hub = hub_module()
    if not hub.get_token():
        raise InputError(f"{folder} needs a login to be written: run `hf auth login`, or set HF_TOKEN")

    def send() -> None:
        with _translated(folder, place):
            api = hub_api()
            if not place.revision:
                api.create_repo(place.repo, private=private, exist_ok=True)
            added = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=local) for name, local in files.items()]
            removed = [hub.CommitOperationDelete(path_in_repo=name) for name in stale()]
            api.create_commit(
                place.repo,
                [*added, *removed],
                commit_message=message or f"diff_dalle: {', '.join(files)}",
                revision=place.revision,
            )

    with explained(folder):
        retry(folder, send)
