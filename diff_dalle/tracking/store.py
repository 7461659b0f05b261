"""Where savers keep files: the interface, and local folders."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from .. import storage

Write = Callable[[BinaryIO], object]  # of one file's content


class Store:
    """A place for files.

    remote: a service, whose failures are reported and never end a run.
    """

    remote = False
    place = ""  # what to call it in messages

    def add(self, name: str, write: Write) -> None:
        """Keep the file that ``write`` writes under ``name``, in place of an earlier one."""
        raise NotImplementedError

    def collect(self) -> list[str]:
        """What there is to report since the last call. Called after every update, so it must be cheap."""
        return []

    def hurry(self) -> None:
        """``finish`` must not wait."""

    def finish(self, note: Callable[[str], object]) -> None:
        """No call follows. ``note`` reports."""


class LocalStore(Store):
    """Files by their paths, relative to the working directory; also those of the storage that ``storage`` knows."""

    def add(self, name: str, write: Write) -> None:
        if folder := storage.split(name)[0]:
            storage.make_dirs(folder)
        with storage.atomic_writer(name) as file:
            write(file)
