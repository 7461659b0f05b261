"""What became of every file of a folder that is packed: it is in the shards, or left out for one reason.

The console, ``report.json`` and ``inspect`` say the same, from the same report.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .. import storage
from ..config import InputError, quantity
from ..images.decode import NO_HEIF, NO_PICTURE, TOO_LARGE, UNREADABLE, BrokenSample
from .captions import EMPTY, NOT_UTF8, NUL

REPORT = "report.json"
MAX_REPORT = 1 << 28  # bytes: some million file names
PARTS = ("picture", "caption", "metadata file")  # what packed files are
NAMED = 3  # files that a line of the console names for each reason


class Reason(Enum):
    """Why a file is not packed."""

    NO_CAPTION = "no caption"
    CAPTION_EMPTY = EMPTY
    CAPTION_NOT_UTF8 = NOT_UTF8
    CAPTION_NUL = NUL
    METADATA_NOT_UTF8 = "its metadata is not UTF-8"
    EMPTY = "an empty file"
    NO_PICTURE = NO_PICTURE
    NO_HEIF = NO_HEIF
    UNREADABLE = UNREADABLE
    TOO_LARGE = TOO_LARGE
    TOO_LONG = "a file of too many bytes"
    OUTSIDE = "outside the folder"
    NO_FILE = "no file that can be read"
    BAD_NAME = "its file name is not valid UTF-8 text"
    CAPTION_ALONE = "a text without a picture of its name"
    CAPTION_UNUSED = "a text whose picture has another caption"
    CAPTION_LOST = "the caption of a picture that is not packed"
    METADATA_UNUSED = "metadata without a row of a packed picture"
    METADATA_SECOND = "metadata beside metadata.jsonl, which is read"
    METADATA_NEARLY = "not read, but named nearly like metadata.jsonl or metadata.csv"
    HIDDEN = "hidden, or of the operating system"
    OTHER = "neither a picture nor a text"


class Skipped(Exception):
    """A file that is not packed."""

    def __init__(self, reason: Reason, detail: str = ""):
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason

    @classmethod
    def of(cls, error: BrokenSample) -> Skipped:
        """Of a picture or caption that cannot be used: what its message begins with is a reason."""
        text, _, detail = str(error).partition(": ")
        return cls(Reason(text), detail)


@dataclass
class Account:
    """The files of a folder and its rows of metadata so far.

    packed:  the files in the shards, by what they are, one of ``PARTS``.
    skipped: the others.
    rows:    what says where those are that are not used, why, and details.
    notes:   the number of packed pictures of which something is to be said.
    """

    packed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def report(self, shard_sizes: Sequence[int]) -> dict[str, Any]:
        """The content of ``report.json``. shard_sizes: in bytes."""
        packed = Counter(self.packed.values())
        reasons = Counter(why.reason.value for why in self.skipped.values())
        row_reasons = Counter(reason for _, reason, _ in self.rows)
        return {
            "files": len(self.packed) + len(self.skipped),
            "packed": {what: packed[what] for what in PARTS if packed[what]},
            "written": packed["picture"],
            "shards": len(shard_sizes),
            "bytes": sum(shard_sizes),
            "skipped": dict(reasons.most_common()),
            "skipped_rows": dict(row_reasons.most_common()),
            "notes": dict(self.notes.most_common()),
            "skipped_files": [
                {"file_name": printable(name), "reason": printable(str(why))}
                for name, why in sorted(self.skipped.items())
            ],
            "rows": [
                {"row": printable(where), "reason": printable(f"{reason}{detail and f': {detail}'}")}
                for where, reason, detail in self.rows
            ],
        }


def printable(text: str) -> str:
    """Text that UTF-8 can hold: other bytes of a file name, and halves of surrogate pairs, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def report_lines(report: dict[str, Any]) -> list[str]:
    """The counts of a report, for people: every file of the folder is in one of the first lines."""
    parts = ", ".join(quantity(count, what) for what, count in report["packed"].items()) or "none"
    skipped = sum(report["skipped"].values())
    lines = [f"{quantity(report['files'], 'file')} in the folder: {parts} packed, {skipped:,} skipped"]
    for reason, count in report["skipped"].items():
        names = [entry["file_name"] for entry in report["skipped_files"] if entry["reason"].startswith(reason)]
        shown = ", ".join(names[:NAMED]) + (", …" if count > NAMED else "")
        lines.append(f"skipped {quantity(count, 'file')}: {reason} ({shown})")
    lines += [f"skipped {quantity(count, 'row')}: {why}" for why, count in report["skipped_rows"].items()]
    return lines + [f"{quantity(count, 'picture')}: {note}" for note, count in report["notes"].items()]


def reported_in(folder: str) -> list[str]:
    """``report_lines`` of the packing that wrote the shards in a folder; none without a report of this form, which may
    come from anybody."""
    path = storage.join(folder, REPORT)
    with contextlib.suppress(InputError, ValueError, RecursionError):
        if storage.exists(path):
            report = json.loads(storage.read_text(path, MAX_REPORT))
            return report_lines(report) if _is_report(report) else []
    return []


def _is_report(report: Any) -> bool:
    """Whether ``report_lines`` can read it."""
    if not isinstance(report, dict) or not isinstance(report.get("files"), int):
        return False
    counts = [report.get(name) for name in ("packed", "skipped", "skipped_rows", "notes")]
    if not all(isinstance(each, dict) and all(isinstance(n, int) for n in each.values()) for each in counts):
        return False
    entries = report.get("skipped_files")
    return isinstance(entries, list) and all(
        isinstance(each, dict) and isinstance(each.get("file_name"), str) and isinstance(each.get("reason"), str)
        for each in entries
    )
