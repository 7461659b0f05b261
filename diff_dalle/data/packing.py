"""Packing a folder of captioned images into shards, with a report of what was skipped and why."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator

from PIL import Image
from tqdm import tqdm

from .. import storage
from ..config import Fault, InputError, named, option, settings
from ..images.decode import IMAGE_KINDS, MAX_PIXELS, BrokenSample, decode_image
from ..images.output import png_bytes
from .captions import read_caption
from .tar import write_tar

METADATA = ("metadata.jsonl", "metadata.csv")
REPORT = "report.json"
JPEG_QUALITY = 95


@settings
class PackingConfig:
    """Packing a folder"""

    source: str = option(
        "",
        "folder of images (searched recursively), each with a caption: a .txt of the same name beside it, or a row of "
        "metadata.jsonl or metadata.csv with its file_name",
    )
    out_dir: str = option("", "new or empty folder for the shards, local or remote")
    caption_column: str = option("caption", "field of metadata.jsonl or metadata.csv that holds captions")
    captions: bool = option(True, "skip images without a caption")
    resize: int = option(
        0, "shorter side in pixels to which larger images are downsampled; 0 = keep the files", least=0
    )
    samples_per_shard: int = option(1000, "maximum number of images per shard", least=1)
    max_pixels: int = option(MAX_PIXELS, "maximum width × height of an image; larger ones are skipped")


class _Skipped(Exception):
    """An image that is skipped; the message says why."""


def pack_folder(config: PackingConfig) -> dict:
    """Write the images of ``source`` as ``00000.tar``, ``00001.tar``, … and ``report.json`` into ``out_dir``.

    Each sample has its image (the file's own bytes unless downsampled), its caption as ``txt``, and a ``json`` with the
    file name, the size in pixels and all other metadata. The same folder gives the same bytes. Links that lead out of
    the folder are not followed. Returns the report. Raises InputError when there is nothing to pack or something would
    be overwritten.
    """
    source = storage.local_path(config.source)
    if not config.source or not os.path.isdir(source):
        raise InputError(Fault("source", f"{config.source or '(not set)'} is not a folder"))
    if not config.out_dir:
        raise InputError(Fault("out_dir", "is not set: name a new folder for the shards"))
    if storage.exists(config.out_dir) and storage.list_files(config.out_dir, recursive=True):
        raise InputError(Fault("out_dir", f"{config.out_dir} is not empty; choose another, nothing is overwritten"))
    rows, bad_lines = _metadata(source, config.caption_column)
    names = sorted({*_images(source), *rows})
    if not names:
        raise InputError(Fault("source", f"{config.source} holds no images ({', '.join(IMAGE_KINDS)})"))
    storage.make_dirs(config.out_dir)
    folder = _Folder(config, source, rows)
    folder.skipped += bad_lines
    sizes: list[int] = []
    samples = folder.samples(tqdm(names, desc="packing", unit="image", disable=None))
    while first := next(samples, None):
        path = storage.join(config.out_dir, f"{len(sizes):05d}.tar")
        write_tar(path, itertools.chain([first], itertools.islice(samples, config.samples_per_shard - 1)))
        sizes.append(storage.size_and_tag(path)[0])
    reasons = Counter(reason.partition(":")[0] for _, reason in folder.skipped)
    report = {
        "images": len(names),
        "written": folder.written,
        "shards": len(sizes),
        "bytes": sum(sizes),
        "skipped": dict(reasons.most_common()),
        "skipped_files": [{"file_name": _printable(name), "reason": _printable(why)} for name, why in folder.skipped],
    }
    storage.write_bytes(storage.join(config.out_dir, REPORT), json.dumps(report, indent=1, ensure_ascii=False).encode())
    if not folder.written:
        listed = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
        raise InputError(
            f"none of the {len(names)} images in {named('source')} {config.source} can be packed: {listed}"
        )
    return report


def _printable(text: str) -> str:
    """Text that UTF-8 can hold: other bytes of a file name, and halves of surrogate pairs, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _images(source: str) -> Iterator[str]:
    """Paths of images relative to the folder, with forward slashes."""
    for path in storage.list_files(source, recursive=True):
        if path.rpartition(".")[2].lower() in IMAGE_KINDS:
            yield os.path.relpath(path, source).replace(os.sep, "/")


def _metadata(source: str, column: str) -> tuple[dict[str, dict], list[tuple[str, str]]]:
    """The rows of metadata.jsonl or metadata.csv by file name, and its unreadable lines with the reasons.

    Nothing without either file. Raises InputError for one without any usable row, or without the needed fields.
    """
    name = next((name for name in METADATA if os.path.exists(os.path.join(source, name))), None)
    if name is None:
        return {}, []
    text = storage.read_bytes(os.path.join(source, name)).decode("utf-8-sig", "replace")
    numbered = list(_csv_rows(text) if name.endswith(".csv") else _json_rows(text))
    rows = [row for _, row in numbered if isinstance(row, dict)]
    bad = [(f"{name}, line {line}", reason) for line, reason in numbered if isinstance(reason, str)]
    if bad and not rows:
        raise InputError(f"{bad[0][0]} {bad[0][1]}, and no other line can be read")
    for required in ("file_name", column):
        if rows and not any(required in row for row in rows):
            hint = f"; set {named('caption_column')} to the field with the captions" if required == column else ""
            found = ", ".join(map(str, rows[0]))
            raise InputError(f"{name} in {named('source')} has no field {required!r}, only {found}{hint}")
    of_files = [{**row, "caption": row.get(column)} for row in rows if row.get("file_name")]
    return {os.path.normpath(str(row["file_name"])).replace(os.sep, "/"): row for row in of_files}, bad


def _json_rows(text: str) -> Iterator[tuple[int, dict | str]]:
    """Line number, and the object in the line or what is wrong with it. Lines end with a line feed only: json may hold
    the other characters that Python takes for line ends."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield number, row if isinstance(row, dict) else "is not a JSON object"


def _csv_rows(text: str) -> Iterator[tuple[int, dict | str]]:
    """Line number, and the row that starts there or what is wrong with it; reading goes on in the next line, so that an
    open quote costs one row. Fields beyond the header are the list ``more``."""
    lines, header, at = list(io.StringIO(text, newline="")), None, 0
    while at < len(lines):
        reader = csv.reader((lines[i] for i in range(at, len(lines))), strict=True)
        number = at + 1
        try:
            fields = next(reader)
            at += reader.line_num
        except csv.Error as error:
            yield number, f"is not valid CSV ({error}): is a quote left open?"
            at += 1
            continue
        if header is None:
            header = fields
        elif fields:
            row: dict = dict(itertools.zip_longest(header, fields[: len(header)]))
            yield number, row | ({"more": fields[len(header) :]} if len(fields) > len(header) else {})


class _Folder:
    """The samples of a folder, and a record of the skipped images."""

    def __init__(self, config: PackingConfig, source: str, rows: dict[str, dict]):
        self.config, self.source, self.rows = config, source, rows
        self.root = os.path.realpath(source)
        self.written = 0
        self.skipped: list[tuple[str, str]] = []

    def samples(self, names) -> Iterator[tuple[str, dict[str, bytes]]]:
        for name in names:
            try:
                members = self._members(name)
            except (_Skipped, BrokenSample, InputError) as reason:
                self.skipped.append((name, str(reason)))
                continue
            yield f"{self.written:08d}", members
            self.written += 1

    def _members(self, name: str) -> dict[str, bytes]:
        if "\0" in name or name != _printable(name):
            raise _Skipped("its file name is not valid UTF-8 text")
        data = self._read(name)
        if data is None:
            raise _Skipped("named in the metadata, but missing")
        image, (height, width) = decode_image(data, self.config.max_pixels)
        kind = name.rpartition(".")[2].lower().replace("jpeg", "jpg")
        if kind not in IMAGE_KINDS:
            raise _Skipped(f"its extension is none of {', '.join(IMAGE_KINDS)}")
        if 0 < self.config.resize < min(height, width):
            image = _resized(image, self.config.resize)
            if kind == "png":
                data = png_bytes(image)
            else:
                kind, buffer = "jpg", io.BytesIO()
                image.save(buffer, "JPEG", quality=JPEG_QUALITY)
                data = buffer.getvalue()
        caption = self._caption(name)
        record = {**self.rows.get(name, {}), "file_name": name, "width": image.width, "height": image.height}
        record["caption"] = caption
        try:
            text = {} if caption is None else {"txt": caption.encode()}
            return {kind: data, **text, "json": json.dumps(record, ensure_ascii=False, sort_keys=True).encode()}
        except UnicodeEncodeError:
            raise _Skipped("its caption or metadata holds half of a surrogate pair, which UTF-8 cannot hold") from None

    def _caption(self, name: str) -> str | None:
        caption = self.rows.get(name, {}).get("caption")
        if not isinstance(caption, str) or not caption.strip():
            data = self._read(f"{name.rpartition('.')[0]}.txt")
            try:
                caption = None if data is None else read_caption(data, "txt")
            except BrokenSample:  # an empty file
                caption = None
        if caption is None and self.config.captions:
            raise _Skipped("no caption")
        if caption and "\0" in caption:
            raise _Skipped("its caption holds a NUL character")
        return caption and caption.strip()

    def _read(self, name: str) -> bytes | None:
        """A file of the folder, or None when it is missing. Raises _Skipped for a link that leads out of the folder."""
        path = os.path.realpath(os.path.join(self.root, name))
        if not path.startswith(os.path.join(self.root, "")):
            raise _Skipped("outside the folder")
        return storage.read_bytes(path) if os.path.isfile(path) else None


def _resized(image: Image.Image, short: int) -> Image.Image:
    scale = short / min(image.size)
    width, height = (max(short, round(length * scale)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0)
