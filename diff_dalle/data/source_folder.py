"""A folder of pictures as people have it: which of its files are pictures, and what belongs to each of them.

A picture's caption is a text of its name (``cat.txt``, ``cat.caption`` or ``cat.png.txt``), or a row of a
metadata.jsonl or metadata.csv in the picture's folder or one above. Names are compared after Unicode normalization:
macOS writes "é" as two characters.
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import json
import math
import os
import posixpath
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .. import storage
from ..config import InputError, named
from ..images.decode import ALL_KINDS
from .accounting import Account, Reason, Skipped

METADATA = ("metadata.jsonl", "metadata.csv")
TEXTS = ("txt", "caption")  # extensions of captions, in order of preference
#: Pictures that are not read unless they are something else in truth, as a jpeg named .jxl is.
UNREAD = ("jxl", "svg", "psd", "eps", "exr", "hdr")
#: Files of cameras, which open as the small preview in them.
RAW = ("dng", "cr2", "cr3", "nef", "arw", "orf", "rw2", "raf")
SYSTEM = ("thumbs.db", "desktop.ini", "__macosx", "@eadir")
NEARLY = 0.85  # similarity of a name to one of ``METADATA`` above which it is probably meant


@dataclass
class Belongings:
    """What belongs to a picture.

    row:      its metadata, without captions. captions: those in the metadata, as found.
    metadata: the files that these come from. texts: files of its name, the best one first.
    """

    row: dict = field(default_factory=dict)
    captions: list = field(default_factory=list)
    metadata: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


class SourceFolder:
    """The files of a folder, by what they are. Names are relative to it, with forward slashes.

    column:  field of the metadata that holds captions: a text, or a list of texts.
    account: told of every file that is neither a picture nor belongs to one, and of unusable rows.

    ``pictures``: what belongs to each, by name in order. ``texts``, ``metadata``: the files that may belong to one.
    Raises InputError for metadata without any usable row, or without the needed fields.
    """

    def __init__(self, root: str, column: str, account: Account):
        self.root, self.account = os.path.realpath(root), account
        self.pictures: dict[str, Belongings] = {}
        self.texts: list[str] = []
        self.metadata: list[str] = []
        self._names = set(self._walk())
        for name in sorted(self._names):
            self._sort_in(name)
        self._by_normal_name = {normal(name): name for name in sorted(self._names, reverse=True)}
        self._match_texts()
        for name in list(self.metadata):
            self._read_metadata(name, column)

    def read(self, name: str, limit: int) -> bytes:
        """A file. Raises Skipped for one that cannot be read or has more than ``limit`` bytes."""
        path = os.path.join(self.root, name)
        if not os.path.isfile(path):
            raise Skipped(Reason.NO_FILE)
        if os.path.getsize(path) > limit:
            raise Skipped(Reason.TOO_LONG, f"more than {limit:,}")
        try:
            return storage.read_bytes(path)
        except InputError as error:
            raise Skipped(Reason.NO_FILE, str(error)) from error

    def _is_inside(self, path: str) -> bool:
        return path == self.root or path.startswith(os.path.join(self.root, ""))

    def _walk(self) -> Iterator[str]:
        """Every file, also hidden ones; a link to a folder elsewhere counts as one file."""
        seen: set[str] = set()
        for folder, folders, names in os.walk(self.root, followlinks=True, onerror=self._unlisted):
            real = os.path.realpath(folder)
            if real in seen:  # links may form cycles
                folders.clear()
                continue
            seen.add(real)
            away = [each for each in folders if not self._is_inside(os.path.realpath(os.path.join(folder, each)))]
            folders[:] = sorted(set(folders).difference(away))
            for each in (*names, *away):
                yield os.path.relpath(os.path.join(folder, each), self.root).replace(os.sep, "/")

    def _unlisted(self, error: OSError) -> None:
        name = os.path.relpath(error.filename, self.root).replace(os.sep, "/")
        self.account.skipped[f"{name}/"] = Skipped(Reason.NO_FILE, f"a folder that cannot be listed: {error.strerror}")

    def _sort_in(self, name: str) -> None:
        skipped, (folder, base), extension = self.account.skipped, posixpath.split(name), _extension(name)
        if any(part.startswith(".") or part.lower() in SYSTEM for part in name.split("/")):
            skipped[name] = Skipped(Reason.HIDDEN)
        elif os.path.islink(path := os.path.join(self.root, name)) and not self._is_inside(os.path.realpath(path)):
            skipped[name] = Skipped(Reason.OUTSIDE)
        elif base in METADATA:
            first = posixpath.join(folder, METADATA[0])
            if name != first and first in self._names:
                skipped[name] = Skipped(Reason.METADATA_SECOND)
            else:
                self.metadata.append(name)
        elif extension in RAW:
            skipped[name] = Skipped(Reason.NO_PICTURE, "a camera's raw file")
        elif extension in ALL_KINDS or extension in UNREAD:
            self.pictures[name] = Belongings()
        elif _is_nearly_metadata(base):
            skipped[name] = Skipped(Reason.METADATA_NEARLY)
        elif extension in TEXTS:
            self.texts.append(name)
        else:
            skipped[name] = Skipped(Reason.OTHER)

    def _match_texts(self) -> None:
        """Give each picture the texts of its name, the best first."""
        by_stem: dict[str, list[str]] = {}
        for text in sorted(self.texts, key=lambda name: (TEXTS.index(_extension(name)), name.endswith(".TXT"), name)):
            by_stem.setdefault(normal(_stem(text)), []).append(text)
        for name, found in self.pictures.items():
            found.texts = [text for stem in (_stem(name), name) for text in by_stem.get(normal(stem), ())]

    def _read_metadata(self, name: str, column: str) -> None:
        """Give each picture the rows that name it. Several rows of one picture are several captions of it."""
        try:
            text = storage.decode_text(storage.read_bytes(os.path.join(self.root, name)), "surrogateescape")
        except UnicodeDecodeError:
            raise InputError(f"{name} in {named('source')} is not UTF-8 text: save it as UTF-8") from None
        bad: list[tuple[str, str, str]] = []

        def refuse(number: int, reason: str, detail: str = "") -> None:
            bad.append((f"{name}, line {number}", reason, detail))

        rows = dict(_csv_rows(text, refuse) if name.endswith(".csv") else _json_rows(text, refuse))
        self.account.rows += bad
        if bad and not rows:
            raise InputError(f"{bad[0][0]} {bad[0][1]}, and no other line can be read")
        for required in ("file_name", column):
            if rows and not any(required in row for row in rows.values()):
                hint = f"; set {named('caption_column')} to the field with the captions" if required == column else ""
                found = ", ".join(map(str, next(iter(rows.values()))))
                raise InputError(f"{name} in {named('source')} has no field {required!r}, only {found}{hint}")
        for number, row in rows.items():
            self._take(row, f"{name}, line {number}", name, column)

    def _take(self, row: dict, where: str, metadata: str, column: str) -> None:
        given, folder = row.get("file_name"), posixpath.dirname(metadata)
        if not isinstance(given, str) or not given:
            self.account.rows.append((where, "has no file_name", ""))
            return
        found = self._find(folder, given)
        if found not in self.pictures:
            inside = self._is_inside(os.path.normpath(os.path.join(self.root, folder, given.replace("\\", "/"))))
            if found:
                reason = "names a file that is not read as a picture"
            else:
                reason = "named in the metadata, but missing" if inside else "outside the folder"
            self.account.rows.append((where, reason, given))
            return
        picture, captions = self.pictures[found], row.get(column)
        picture.row = {**row, **picture.row}  # the first row of a picture decides
        picture.captions += captions if isinstance(captions, list) else [captions]
        picture.metadata.add(metadata)

    def _find(self, folder: str, given: str) -> str:
        """The file that a row names, relative to the row's folder or as a whole path; "" when there is none."""
        for name in (given, given.replace("\\", "/")):
            path = os.path.normpath(os.path.join(self.root, folder, name))
            relative = os.path.relpath(path, self.root).replace(os.sep, "/")
            found = relative if relative in self._names else self._by_normal_name.get(normal(relative), "")
            if found:
                return found
        return ""


def normal(name: str) -> str:
    """The form in which names are compared: composed characters (Unicode Standard Annex 15, form C)."""
    return unicodedata.normalize("NFC", name)


def _extension(name: str) -> str:
    return posixpath.splitext(name)[1][1:].lower()


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0]


def _is_nearly_metadata(base: str) -> bool:
    known = base.lower() in METADATA or _stem(base).lower() == "metadata"
    return known or bool(difflib.get_close_matches(base.lower(), METADATA, 1, NEARLY))


def _json_rows(text: str, refuse: Callable[[int, str], None]) -> Iterator[tuple[int, dict]]:
    """Line number, and the object in the line. refuse: told of the lines without one.

    Lines end with a line feed only: json may hold the other characters that Python takes for line ends. Numbers that
    json does not know, such as NaN, become null.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line, parse_constant=lambda name: None, parse_float=_finite)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield number, row
            else:
                refuse(number, "is not a JSON object")


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _csv_rows(text: str, refuse: Callable[[int, str, str], None]) -> Iterator[tuple[int, dict]]:
    """Line number, and the row that starts there. refuse: told of the lines without one; reading goes on in the next
    line, so that an open quote costs one row. Fields beyond the header are the list ``more``."""
    lines, header, at = list(io.StringIO(text, newline="")), None, 0
    separator = _separator(lines[0] if lines else "")
    while at < len(lines):
        reader = csv.reader((lines[i] for i in range(at, len(lines))), strict=True, delimiter=separator)
        number = at + 1
        try:
            fields = next(reader)
            at += reader.line_num
        except csv.Error as error:
            refuse(number, "is not valid CSV", f"{error}: is a quote left open?")
            at += 1
            continue
        if header is None:
            header = fields
        elif fields:
            row: dict = dict(itertools.zip_longest(header, fields[: len(header)]))
            yield number, row | ({"more": fields[len(header) :]} if len(fields) > len(header) else {})


def _separator(header: str) -> str:
    """What separates fields: a comma, unless only with a semicolon or tabs there is a file_name."""
    names = (each for each in ",;\t" if "file_name" in (part.strip('" \r\n') for part in header.split(each)))
    return next(names, ",")
