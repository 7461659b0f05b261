"""Hostile files: damaged, cut, spliced, or well-formed with strange content."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from .contract import Group, Skipped, require
from .hostile_cases import CASES, LIMIT_BYTES, LIMIT_SECONDS, REPORT
from .place import Place
from .processes import Job, environment

GROUP = Group("files")
QUICK_PART = 40  # the quick form reads every 40th case
MINUTES = 20.0  # in which a parser reads its cases, unless one of them never ends


def _reads(place: Place, parser: str) -> str:
    cases = CASES[parser]
    if place.quick:
        cases = -(-cases // QUICK_PART)
    folder = place.path / "hostile"
    folder.mkdir()
    command = [sys.executable, "-m", "drills.hostile", parser, str(cases), str(place.bench.seed), str(folder)]
    job = Job(command, place.path / "hostile.txt", environment(XDG_CACHE_HOME=str(place.path)))
    outcome = job.wait(60 * MINUTES)
    outcome.succeeded(f"the reading process ended with status {outcome.status}")
    report = json.loads((folder / REPORT).read_text())
    if "skipped" in report:
        raise Skipped(report["skipped"])
    counts = f"{cases:,} cases: {report.get('read', 0):,} read, {report.get('refused', 0):,} refused"
    found = "; ".join(f"{what} ({count} ×)" for what, count in report["found"].items())
    require(not report.get("wrong"), f"{counts}, {report.get('wrong', 0):,} wrong: {found}")
    drilled = Path("/tmp/drilled")
    require(not drilled.exists(), f"a command in a file was run: it made {drilled}")
    return counts


for _parser in CASES:
    _promised = f"read or refused in a sentence, within {LIMIT_SECONDS:.0f} s and {LIMIT_BYTES >> 30} GiB each"
    GROUP.fault(f"hostile {_parser}", _promised, every_kind=False)(partial(_reads, parser=_parser))
