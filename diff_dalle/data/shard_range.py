"""Numbered shards: a template with a field for the number, the numbers that exist, and their division into parts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import storage
from ..errors import Fault, InputError, named, quantity
from ..randomness import permutation

FIELD = "{}"
URL = "webdataset_base_url"
MOST_NAMED = 8  # missing shards in a message
MOST_UNLISTED = 100_000  # shards of a source that cannot be listed
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardRange:
    """The shards whose numbers lie between two ends.

    template: path, URL or ``pipe:COMMAND`` of a shard with ``{}`` for its number.
    start, end: first and last number; there may be fewer.
    width:    digits of a number, padded with zeros.

    Raises InputError for a template without exactly one ``{}`` and an empty range.
    """

    template: str
    start: int
    end: int
    width: int

    def __post_init__(self):
        InputError.check(self._faults())

    def _faults(self) -> Iterator[Fault]:
        if self.template.count(FIELD) != 1:
            yield Fault(URL, f"must have {FIELD} once, in place of the shard's number", self.template)
        if not 0 <= self.start <= self.end:
            yield Fault("start_shard", f"must be at least 0 and at most {named('end_shard')} ({self.end})", self.start)
        if self.width < 1:
            yield Fault("shard_width", "must be at least 1", self.width)

    def path(self, number: int) -> str:
        return self.template.replace(FIELD, f"{number:0{self.width}d}")

    def find(self) -> list[str]:
        """The shards that exist, by number. Missing ones between them, and up to an ``end`` that is below what a
        listing of the folder shows, are named in the log.

        A folder is listed; the last shard of a web server is searched for, as if none before it were missing; what a
        command has is not known: all of the range is expected. Raises InputError when there are none.
        """
        scheme = storage.scheme(self.template)
        if scheme == "pipe":
            return [self.path(number) for number in self._all()]
        if scheme in ("http", "https"):
            return [self.path(number) for number in range(self.start, self._last_on_server() + 1)]
        found = self._listed()
        if not found:
            raise self._absent(f"none of its shards from {self.path(self.start)} on exists")
        missing = sorted(set(range(self.start, self._expected(found) + 1)) - set(found))
        if missing:
            log.warning("of the shards %s, %s", self.template, _listed(missing, self.width))
        return [self.path(number) for number in found]

    def _all(self) -> range:
        if self.end - self.start >= MOST_UNLISTED:
            rule = (
                f"the shards {self.template} cannot be listed: set {named('end_shard')} to the number of the last one, "
                "or give a path or URL in place of a command"
            )
            raise InputError(Fault("end_shard", rule, self.end))
        return range(self.start, self.end + 1)

    def _absent(self, what: str) -> InputError:
        return InputError(Fault(URL, f"is {self.template}, but {what}"))

    def _expected(self, found: Sequence[int]) -> int:
        """The last shard that ought to exist: that of the range, unless this is far beyond what there is."""
        is_open = self.end >= 10**self.width - 1 or self.end - found[-1] >= MOST_UNLISTED
        return found[-1] if is_open else self.end

    def _listed(self) -> list[int]:
        folder, name = storage.split(self.template)
        if FIELD not in name:
            return [number for number in self._all() if storage.exists(self.path(number))]
        if not (storage.is_remote(folder) or storage.exists(folder or ".")):
            raise self._absent(f"there is no folder {folder}")
        before, after = (re.escape(part) for part in name.split(FIELD))
        pattern = re.compile(f"{before}([0-9]{{{self.width},}}){after}")
        matches = (pattern.fullmatch(storage.split(path)[1]) for path in storage.list_files(folder or "."))
        numbers = [int(match[1]) for match in matches if match and self.path(int(match[1])).endswith(match[0])]
        return sorted(number for number in numbers if self.start <= number <= self.end)

    def _last_on_server(self) -> int:
        """The last of the shards on a web server, by doubling steps and then bisection."""

        def exists(number: int) -> bool:
            return number <= self.end and storage.exists(self.path(number))

        if not exists(self.start):
            raise self._absent(f"{self.path(self.start)} does not exist")
        step = 1
        while exists(self.start + step):
            step *= 2
        low, high = self.start + step // 2, self.start + step  # one that exists, and one that does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if exists(middle) else (low, middle)
        return low


def _listed(missing: Sequence[int], width: int) -> str:
    """``3 shards are missing: 000004, 000007–000008``."""
    runs: list[list[int]] = []
    for number in missing:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}–{b:0{width}d}" for a, b in runs]
    rest = ", …" if len(texts) > MOST_NAMED else ""
    verb = "is" if len(missing) == 1 else "are"
    return f"{quantity(len(missing), 'shard')} {verb} missing: {', '.join(texts[:MOST_NAMED])}{rest}"


def divide(shards: Sequence[str], parts: Mapping[str, float], seed: int) -> dict[str, list[str]]:
    """Shards divided at random into named parts, each in the given order.

    parts: fractions that add up to 1. Every part above 0 gets a shard, and otherwise the nearest whole number of them.

    Raises InputError when there are fewer shards than parts.
    """
    wanted = {name: fraction for name, fraction in parts.items() if fraction > 0}
    if len(shards) < len(wanted):
        rule = (
            f"divides the shards into {', '.join(wanted)}, but there is only {quantity(len(shards), 'shard')}, the "
            f"first {shards[0]}: give more shards, or set the splits that you do without to 0"
        )
        raise InputError(Fault("splits", rule))
    counts = {name: max(1, int(fraction * len(shards))) for name, fraction in wanted.items()}
    while sum(counts.values()) < len(shards):
        counts[max(counts, key=lambda name: wanted[name] * len(shards) - counts[name])] += 1
    while sum(counts.values()) > len(shards):  # some were lifted to 1
        counts[max(counts, key=lambda name: counts[name] - wanted[name] * len(shards) if counts[name] > 1 else -1)] -= 1
    order = permutation(seed, "division of shards", len(shards)).tolist()
    divided, begin = {}, 0
    for name in parts:
        end = begin + counts.get(name, 0)
        divided[name] = [shards[number] for number in sorted(order[begin:end])]
        begin = end
    return divided
