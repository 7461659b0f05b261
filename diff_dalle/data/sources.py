"""The value of ``--data_dir``, or a range of numbered shards → the list of shards it stands for, and its division.

Nothing is kept: each start lists them anew.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import storage
from ..config import MAX_TEXT, Fault, InputError, load_texts, named, quantity, redact
from ..randomness import permutation

LISTS = (".yml", ".yaml")
TARS = (".tar", ".tar.gz", ".tgz")  # how the names of shards end where they are searched for
DATA_DIR = named("data_dir")  # in messages, unless the sources are those of another setting
EXPANDED = "expand:"  # before pipe:COMMAND, asks for the expansion of its braces


def find_shards(sources: Sequence[str] | str, flag: str = DATA_DIR) -> list[str]:
    """The shards of all sources, in order.

    A source is a folder (all ``TARS`` in it and its subfolders), a tar, a glob, a brace range ``{00000..00099}.tar``,
    a URL (on s3, gs and az also a folder) or ``pipe:COMMAND``, whose output is a tar. A command is taken as it is;
    ``expand:pipe:COMMAND`` stands for one command for each value of its brace ranges. A ``.yml`` or ``.yaml`` file
    holds a list of sources; one from elsewhere cannot name commands. Raises InputError naming ``flag`` for a source
    that does not exist or holds no shard.
    """
    sources = [sources] if isinstance(sources, str) else sources
    if not any(sources):
        raise InputError(f"{flag} is not set: name a folder with .tar shards")
    return [shard for source in sources if source for shard in _expand(source, flag)]


def _expand(source: str, flag: str) -> list[str]:
    from braceexpand import braceexpand  # here, because scripts/gpu_check.sh trains without this package

    if storage.scheme(source) == "pipe":
        return [source]
    remote = storage.is_remote(source)
    if storage.split(source)[1].lower().endswith(LISTS) and not source.startswith(EXPANDED):
        return [shard for each in _listed(source, flag) for shard in _expand(each, flag)]
    if not remote and storage.exists(source):
        path = storage.local_path(source)
        return _in_folder(path, flag) if os.path.isdir(path) else [path]
    try:
        paths = list(braceexpand(source.removeprefix(EXPANDED)))
    except ValueError:
        raise InputError(f"{flag} {source} has unbalanced braces") from None
    if source.startswith(EXPANDED) or ("{" in source and paths != [source]):  # perhaps a range of one
        return [shard for path in paths for shard in _expand(path, flag)]
    if remote and (storage.scheme(source) in ("http", "https") or _is_tar(source)):
        return [source]
    if re.search(r"[*?\[]", source):
        return _matching(source, flag)
    if remote:
        return _in_folder(source, flag)
    raise InputError(f"{flag} {source} does not exist")


def _listed(path: str, flag: str) -> list[str]:
    """The sources in a list file."""
    found = load_texts(storage.read_text(path, MAX_TEXT), f"{flag} {path}")
    if not found:
        raise InputError(f"{flag} {path} is an empty list: name folders or .tar shards in it")
    for each in found:
        if each.lower().endswith(LISTS):
            raise InputError(f"{flag} {path} names {each}, but a list cannot name a list: copy its lines")
        if storage.is_remote(path) and each.removeprefix(EXPANDED).startswith("pipe:"):
            raise InputError(f"{flag} {path} names a command, but only a local list can: copy the file")
    return found


def _is_tar(path: str) -> bool:
    return storage.split(path)[1].lower().endswith(TARS) and not re.search(r"[*?\[]", path)


def _in_folder(folder: str, flag: str) -> list[str]:
    files = storage.list_files(folder, recursive=True)
    shards = [path for path in files if _is_tar(path)]
    if not shards:
        if not files:
            raise InputError(f"{flag} {folder} is empty: it must hold .tar shards of images and captions")
        found = quantity(len(files), "other file")
        hint = "pack images with `diff-dalle prepare_data folder`"
        raise InputError(f"{flag} {folder} holds no .tar shards, but {found}; {hint}")
    return shards


def _matching(pattern: str, flag: str) -> list[str]:
    if storage.is_remote(pattern):
        folder = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]
        files = storage.list_files(folder, recursive=True)
        shards = fnmatch.filter(files, pattern)
    else:
        shards = sorted(filter(os.path.isfile, glob.glob(storage.local_path(pattern), recursive=True)))
    if not shards:
        raise InputError(f"{flag} {pattern} matches no file")
    return shards


FIELD = "{}"
URL = "webdataset_base_url"
MOST_NAMED = 8  # missing shards in a message
MOST_UNLISTED = 100_000  # shards of a source that cannot be listed
COMMAND_TRIES = 2  # of a command that fails, until what it would send counts as absent
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

        A folder is listed; the last shard of a web server is searched for, as if none before it were missing, and so is
        that of a command when the range is an open one: a shard is there if its command sends a byte. Of a command's
        other ranges all shards are expected. Raises InputError when there are none.
        """
        scheme = storage.scheme(self.template)
        if scheme == "pipe" and not self._is_open(self.start):
            return [self.path(number) for number in self._all()]
        if scheme in ("http", "https", "pipe"):
            return [self.path(number) for number in range(self.start, self._last_of(scheme) + 1)]
        found = self._listed()
        if not found:
            raise self._absent(f"none of its shards from {self.path(self.start)} on exists")
        missing = sorted(set(range(self.start, self._expected(found) + 1)) - set(found))
        if missing:
            log.warning("of the shards %s, %s", self.template, _runs(missing, self.width))
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
        return found[-1] if self._is_open(found[-1]) else self.end

    def _is_open(self, last: int) -> bool:
        """Whether the end of the range says nothing about how many shards there are, of which ``last`` is one."""
        return self.end >= 10**self.width - 1 or self.end - last >= MOST_UNLISTED

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

    def _last_of(self, scheme: str) -> int:
        """The last of the shards on a web server or of a command, by doubling steps and then bisection: of n shards,
        at most 2 log2(n) + 2 are asked for."""
        asked: list[int] = []

        def exists(number: int) -> bool:
            if number > self.end:
                return False
            asked.append(number)
            return _sends(self.path(number)) if scheme == "pipe" else storage.exists(self.path(number))

        if not exists(self.start):
            problem = "fails, or sends nothing" if scheme == "pipe" else "does not exist"
            raise self._absent(f"{self.path(self.start)} {problem}")
        step = 1
        while exists(self.start + step):
            step *= 2
        left = range(self.start + step // 2 + 1, self.start + step)  # between one that exists and one that does not
        last = left.start - 1 + bisect.bisect_left(left, True, key=lambda number: not exists(number))
        if scheme == "pipe":
            if last - self.start >= MOST_UNLISTED:  # it sends something whatever the number is
                self._all()
            log.warning(
                "the last of the shards %s is %s, as %s of the command show if none before it is missing; if one is, "
                "set end_shard to the last one",
                redact(self.template),
                f"{last:0{self.width}d}",
                quantity(len(asked), "start"),
            )
        return last


def _sends(path: str) -> bool:
    """Whether a command sends a byte. One that fails is started again: its reason may pass."""
    for _ in range(COMMAND_TRIES):
        with contextlib.suppress(storage.FailedCommandError), storage.open_read(path) as stream:
            return bool(stream.read(1))
    return False


def _runs(missing: Sequence[int], width: int) -> str:
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
