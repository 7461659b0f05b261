"""What is found out once about every sample from its own members, and kept beside the index: the verdicts of filters on
its json, and the size of its image from the header.

Each is a column: a file per shard with a value for each sample of the tar. A column that is missing, or of another
state of the shard, is read from the tar and written again; an index from before there were columns is extended.
All processes of a job share the work. It costs one pass over the headers of the images, or over the json members; of
remote shards up to one download of each, of the outputs of commands nothing beyond the copies that indexing made.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import InputError, named, quantity, redact
from ..distributed.world import ALONE, World
from ..images.decode import BrokenSample, image_size
from .filters import REASONS, Filter, Verdict, verdicts
from .index import Indexed, read_table, shared, table_folders, writable_file
from .shard_table import IMAGE, Table, alternatives, load_column, save_column
from .shards import Read, ShardFiles
from .spec import Required

SIZES = "sizes"  # the name of the column with the images' sizes
HEADERS = (1 << 12, 1 << 16, 1 << 20)  # bytes of an image that are read, one after the other, until its size is known
PNG, PNG_END = b"\x89PNG", 1 << 12  # its first bytes, and the number of its last ones that may hold EXIF data
MAX_IMAGE = 1 << 28  # bytes; as in collection.MAX_BYTES
MAX_JSON = 1 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """The answers for the samples of one shard that have the required members.

    kept:     bool [samples], whether all filters accept them.
    verdicts: int [filters, verdicts], numbers of samples.
    sizes:    int32 [kept samples, 2] height and width, 0 = unreadable; None = not wanted.
    """

    kept: np.ndarray
    verdicts: np.ndarray
    sizes: np.ndarray | None


def survey_shards(
    entries: Sequence[Indexed], required: Required, files: ShardFiles, world: World = ALONE
) -> list[Survey]:
    """The answers about every shard: on rank 0, which alone has the entries; the other processes of ``world`` help."""
    job = _Surveyor(required, files)
    return shared(job.survey, world.broadcast(entries), world, "surveying shards")


def rejections(filters: Sequence[Filter], surveys: Sequence[Survey]) -> list[str]:
    """A line for each filter: how many samples it rejects, and why."""
    total = quantity(sum(len(each.kept) for each in surveys), "sample")
    lines = []
    for each, counts in zip(filters, _rejected(surveys), strict=True):
        said = ", ".join(f"{count:,} {reason}" for count, reason in zip(counts, REASONS, strict=True) if count)
        lines.append(f"filter {each.text!r}: rejects {counts.sum():,} of {total}" + (f" ({said})" if said else ""))
    return lines


def check_kept(filters: Sequence[Filter], surveys: Sequence[Survey]) -> None:
    """Raise InputError when the filters reject all samples, naming the one that rejects the most."""
    if not filters or any(each.kept.any() for each in surveys):
        return
    counts = _rejected(surveys).sum(1)
    worst = int(counts.argmax())
    alone = counts[worst] == sum(len(each.kept) for each in surveys)
    rest = "" if alone else "; with the other filters it leaves none"
    said = rejections(filters, surveys)[worst]
    raise InputError(f"{named('dataset_filters')} rejects all samples: {said}{rest}; change it")


def _rejected(surveys: Sequence[Survey]) -> np.ndarray:
    """The number of samples that each filter rejects for each of ``REASONS``, over all shards: [filters, reasons]."""
    return np.sum([survey.verdicts for survey in surveys], axis=0)[:, 1:]


class _Surveyor:
    def __init__(self, required: Required, files: ShardFiles):
        self.required, self.files = required, files
        self._said_remote = self._said_unkept = False

    def survey(self, entry: Indexed) -> Survey:
        table = read_table(entry.shard, entry.table, self.files)
        rows = table.select(self.required.members).rows
        kept, counts = np.ones(len(rows), dtype=bool), np.zeros((len(self.required.filters), len(Verdict)), dtype=int)
        for i, column in enumerate(self._verdicts(entry, table)):
            here = column[rows, 0]
            kept &= here == Verdict.ACCEPTED
            counts[i] = np.bincount(here, minlength=len(Verdict))[: len(Verdict)]
        sizes = self._sizes(entry, table)[rows[kept]] if self.required.sizes else None
        return Survey(kept, counts, sizes)

    def _verdicts(self, entry: Indexed, table: Table) -> list[np.ndarray]:
        """What each filter says about every sample of the tar: uint8 [samples, 1] each."""
        names = {f"filter-{each.fingerprint}": each for each in self.required.filters}
        known = {name: self._load(entry, name, np.uint8, 1) for name in names}
        missing = [name for name in names if known[name] is None]
        if missing:
            asked = [names[name] for name in missing]
            read = self._reader(entry)
            spans = table.spans(("json",)).tolist()
            rows = [verdicts(asked, _json(read, *span)) for span in spans]
            columns = np.array(rows, dtype=np.uint8).reshape(len(spans), len(asked), 1)
            for i, name in enumerate(missing):
                known[name] = self._save(entry, name, columns[:, i])
        return [column for column in known.values() if column is not None]

    def _sizes(self, entry: Indexed, table: Table) -> np.ndarray:
        """Height and width of the image of every sample of the tar: int32 [samples, 2]."""
        found = self._load(entry, SIZES, np.int32, 2)
        if found is None:
            read = self._reader(entry)
            spans = table.spans(alternatives(IMAGE)).tolist()
            sizes = np.array([_image_size(read, *span) for span in spans], dtype=np.int32)
            found = self._save(entry, SIZES, sizes.reshape(-1, 2))
        return found

    def _reader(self, entry: Indexed) -> Read:
        shard = entry.shard
        if self.files.in_place(shard) and not self._said_remote:
            self._said_remote = True
            log.warning(
                "%s and other remote shards are read nearly whole, once: what the filters and buckets need is then "
                "kept in the index",
                redact(shard.path),
            )
        return self.files.consecutive(shard)

    def _load(self, entry: Indexed, name: str, dtype: type, width: int) -> np.ndarray | None:
        folders, table = table_folders(entry.path, self.files.index_cache)
        paths = (os.path.join(folder, f"{table}.{name}.npz") for folder in folders)
        columns = (load_column(path, entry.summary, dtype, width) for path in paths)
        return next((column for column in columns if column is not None), None)

    def _save(self, entry: Indexed, name: str, values: np.ndarray) -> np.ndarray:
        """Keep a column for the next start, if possible, and return it."""
        try:
            save_column(writable_file(entry.path, self.files, f"{name}.npz"), entry.summary, values)
        except InputError as error:
            if not self._said_unkept:
                self._said_unkept = True
                log.warning("%s: it is found out again at the next start; set index_cache to another folder", error)
        return values


def _json(read: Read, offset: int, size: int) -> bytes | None:
    return read(offset, size) if 0 < size <= MAX_JSON else None


def _image_size(read: Read, offset: int, size: int) -> tuple[int, int]:
    """(height, width) of an image; (0, 0) of none, and of one that cannot be read."""
    if not 0 < size <= MAX_IMAGE:
        return 0, 0
    for limit in HEADERS:
        data = read(offset, min(limit, size))
        with contextlib.suppress(BrokenSample):
            found = image_size(data)
            if data.startswith(PNG) and limit < size:  # one that is turned may say so after its pixels
                end = max(limit, size - PNG_END)
                found = image_size(data + read(offset + end, size - end))
            return found
        if limit >= size:
            return 0, 0
        if data[:4] == b"RIFF":  # a webp, which can only be opened whole
            break
    with contextlib.suppress(BrokenSample):
        return image_size(read(offset, size))
    return 0, 0
