"""What makes hostile files, and what reads them from a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .mutations import as_json, damaged, distorted

Case = Callable[[random.Random], bytes]
# (folder) → (a function that makes a hostile file, a function that reads it)
Make = Callable[[Path], tuple[Case, Callable[[bytes], Any]]]


def from_file(path: Path, read: Callable[[str], Any]) -> Callable[[bytes], Any]:
    """A reader of bytes that go through a file."""

    def reader(data: bytes) -> Any:
        path.unlink(missing_ok=True)  # another file each time: an earlier one may still be mapped into memory
        path.write_bytes(data)
        return read(str(path))

    return reader


def mixed(*cases: Case) -> Case:
    return lambda chance: chance.choice(cases)(chance)


def json_cases(seeds: Sequence[bytes], *values: Any) -> Case:
    """Damaged texts, and distorted values."""
    return mixed(partial(damaged, seeds), lambda chance: as_json(distorted(chance.choice(values), chance)))
