"""Modules outside the checkout, with parts of one's own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import diff_dalle

TABLES = (diff_dalle.LOSSES, diff_dalle.SAMPLERS, diff_dalle.TASKS, diff_dalle.FILTERS, diff_dalle.WORLDS)


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """The modules in a folder can be imported in the block; nothing is left of them afterwards."""
    with contextlib.ExitStack() as stack:
        for table in TABLES:
            stack.enter_context(mock.patch.dict(table))
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path, str(folder)]))
        yield
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
