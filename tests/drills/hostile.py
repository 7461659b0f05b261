"""Reads hostile files of one kind in a process of its own, watched from outside:
``python -m drills.hostile PARSER CASES SEED FOLDER``.

Every case must end with success, InputError or BrokenSample, within LIMIT_SECONDS of computing, WAIT_SECONDS in all,
and the memory limit. The report in FOLDER says how many did not, with the first few, which are kept there as files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import resource
import signal
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from diff_dalle.config import InputError
from diff_dalle.images.decode import BrokenSample

from .contract import Skipped
from .hostile_cases import LIMIT_BYTES, LIMIT_SECONDS, REPORT
from .parsers import PARSERS

WAIT_SECONDS = 20.0
CURRENT = "current"
KEPT = 20


class TooSlow(BaseException):
    """A case that took too long; no parser catches it by chance."""


def _too_slow(*_: Any) -> None:
    raise TooSlow


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def verdict_on(read, data: bytes) -> str:
    """What became of a case: "read", "refused", or what went wrong, in a line."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS)
    try:
        read(data)
        return "read"
    except (InputError, BrokenSample):
        return "refused"
    except TooSlow:
        return f"no end within {LIMIT_SECONDS:.0f} s"
    except MemoryError:
        return f"more than {LIMIT_BYTES >> 20} MiB"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {str(error)[:120]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def read_all(parser: str, cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """Read this many cases. The report: counts of "read" and "refused", and "wrong" by what went wrong."""
    make, read = PARSERS[parser](folder)
    counts: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for number in range(cases):
        data = make(random.Random(f"{parser} {seed} {number}"))
        (folder / CURRENT).write_bytes(data)  # what the watching process finds if this one does not come back
        verdict = verdict_on(read, data)
        counts[verdict if verdict in ("read", "refused") else "wrong"] += 1
        if verdict not in ("read", "refused"):
            wrong[verdict] += 1
            if len(wrong) <= KEPT and wrong[verdict] == 1:
                (folder / f"wrong_{len(wrong)}").write_bytes(data)
    return {**counts, "found": dict(wrong.most_common(KEPT))}


def main() -> None:
    parser, cases, seed, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, _too_slow)
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        try:
            _limit_memory()
            report = read_all(parser, cases, seed, folder)
        except Skipped as reason:
            report = {"skipped": str(reason)}
    (folder / REPORT).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
