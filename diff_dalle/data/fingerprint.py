"""What identifies training data: the shards in their order, each by name, size and number of samples.

A shard's name is that of its file: data that were copied elsewhere are the same data. Times and ETags are left out for
the same reason, so a shard that was rewritten with the same size and number of samples is not noticed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import storage
from ..config import InputError, quantity, redact
from ..distributed.world import World

SHOWN = 3  # shards named in a message

Row = tuple[str, int, int]


@dataclass(frozen=True)
class Fingerprint:
    """The shards of a data set: (name, size in bytes, usable samples) of each, in order."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, paths: Iterable[str], sizes: Iterable[int], samples: Iterable[int]) -> Fingerprint:
        return cls(tuple(zip(map(shard_name, paths), map(int, sizes), map(int, samples), strict=True)))

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """What ``text`` wrote. Raises ValueError for anything else."""
        rows = [json.loads(line) for line in text.splitlines()]
        for row in rows:
            if not isinstance(row, list) or [type(value) for value in row] != [str, int, int]:
                raise ValueError("each line must be [name, size, samples]")
        return cls(tuple(map(tuple, rows)))

    def text(self) -> str:
        """One JSON list per shard and line."""
        return "".join(json.dumps(row) + "\n" for row in self.rows)

    @functools.cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that differ for other shards or another order."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def totals(self) -> str:
        samples = sum(samples for _, _, samples in self.rows)
        return f"{quantity(len(self.rows), 'shard')} with {quantity(samples, 'sample')}"


def shard_name(path: str) -> str:
    """By which a shard is known wherever it is."""
    return redact(path) if storage.scheme(path) == "pipe" else storage.split(path)[1]


def changes(old: Fingerprint, new: Fingerprint) -> str:
    """What differs, for a message: ``2 shards new (00004.tar, 00005.tar); 1 shard of another size (00001.tar)``."""
    before, after = _numbered(old.rows), _numbered(new.rows)
    both = [key for key in after if key in before and after[key] != before[key]]
    found = (
        ("new", [key for key in after if key not in before]),
        ("gone", [key for key in before if key not in after]),
        ("of another size", [key for key in both if before[key][0] != after[key][0]]),
        ("of another number of samples", [key for key in both if before[key][0] == after[key][0]]),
    )
    said = [f"{quantity(len(keys), 'shard')} {what} ({_listed(keys)})" for what, keys in found if keys]
    return "; ".join(said) or "the same shards in another order"


def _numbered(rows: Sequence[Row]) -> dict[tuple[str, int], tuple[int, int]]:
    """Size and samples by name, and by how many shards before have the same name, as in several folders."""
    seen: Counter[str] = Counter()
    table = {}
    for name, size, samples in rows:
        table[name, seen[name]] = size, samples
        seen[name] += 1
    return table


def _listed(keys: Sequence[tuple[str, int]]) -> str:
    return ", ".join(name for name, _ in keys[:SHOWN]) + (", …" if len(keys) > SHOWN else "")


def check_ranks(world: World, own: Fingerprint, flag: str) -> None:
    """InputError, on every rank, unless all ranks see the same shards. ``flag`` names them."""
    if len(set(world.gather(own.digest))) == 1:
        return
    first = Fingerprint(world.broadcast(own.rows))
    found = world.gather("" if own.digest == first.digest else changes(first, own))
    rank = next(rank for rank, text in enumerate(found) if text)
    raise InputError(f"{flag} names other shards on rank {rank} than on rank 0: {found[rank]}; give all the same")
