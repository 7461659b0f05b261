"""The drill as a whole: which faults with which kinds, in parallel, and the table of outcomes."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from diff_dalle.config import InputError, lookup, option, quantity

from . import (
    faults_data,
    faults_ends,
    faults_files,
    faults_long,
    faults_machine,
    faults_numbers,
    faults_ranks,
    faults_remote,
)
from .contract import Deviation, Fault, Group, Skipped
from .place import KINDS, Bench
from .processes import SCRIPTS

MODULES = (
    faults_ends,
    faults_ranks,
    faults_machine,
    faults_data,
    faults_remote,
    faults_numbers,
    faults_files,
    faults_long,
)
GROUPS = {module.GROUP.name: module.GROUP for module in MODULES}


@dataclass(frozen=True)
class DrillConfig:
    """Drill"""

    quick: bool = option(False, "a few of each fault in about eight minutes instead of all of them")
    faults: tuple[str, ...] = option((), f"groups of faults, of {', '.join(GROUPS)}; none = all")
    kinds: tuple[str, ...] = option(tuple(KINDS), f"kinds of networks, of {', '.join(KINDS)}")
    jobs: int = option(2, "faults that are drilled at the same time")
    seed: int = option(0, "seed of the random moments")
    out_dir: str = option("", "folder for the table as drill.md and drill.json; empty = none")
    keep: bool = option(False, "keep the folders of the runs of faults that fail")

    def __post_init__(self):
        if self.jobs < 1:
            raise InputError(f"jobs is {self.jobs}, but must be at least 1")
        for name in self.faults:
            lookup(GROUPS, name, "group of faults")
        for name in self.kinds:
            lookup(KINDS, name, "kind")

    @property
    def groups(self) -> list[Group]:
        return [GROUPS[name] for name in self.faults or GROUPS]


@dataclass(frozen=True)
class Row:
    """A fault with one kind of network, and what was seen. result: PASS, FAIL or SKIP."""

    group: str
    fault: str
    kind: str
    promised: str
    seen: str
    result: str
    seconds: float


def cells(config: DrillConfig) -> Iterator[tuple[Fault, str]]:
    """The faults and kinds to be drilled. The quick form takes the kinds in turn."""
    turn = 0
    for group in config.groups:
        for fault in group.faults:
            kinds = config.kinds if fault.every_kind else config.kinds[:1]
            count = min(len(kinds), fault.quick_kinds) if config.quick else len(kinds)
            for i in range(count):
                yield fault, kinds[(turn + i) % len(kinds)]
            turn += count if fault.every_kind else 0


def drill(fault: Fault, kind: str, bench: Bench, keep: bool = False) -> Row:
    """Drill one fault with one kind."""
    place, started = bench.place(kind), time.monotonic()
    try:
        seen, result = fault.drill(place), "PASS"
    except Deviation as deviation:
        seen, result = str(deviation), "FAIL"
        if keep:
            seen += f" ({place.path})"
    except Skipped as reason:
        seen, result = str(reason), "SKIP"
    except Exception as error:  # of the drill itself: the other faults are drilled all the same
        seen, result = f"the drill failed: {type(error).__name__}: {error}", "FAIL"
    if not (keep and result == "FAIL"):
        place.clear()
    return Row(fault.group, fault.name, kind, fault.promised, seen, result, round(time.monotonic() - started, 1))


def run_drill(config: DrillConfig) -> list[Row]:
    """Drill all cells. Raises InputError outside of a checkout, whose scripts are what is drilled."""
    if not (SCRIPTS / "drill.py").exists():
        raise InputError(f"the drill runs the scripts of a checkout, but {SCRIPTS} does not hold them")
    folder = Path(tempfile.mkdtemp(prefix="drill-"))
    todo = list(cells(config))
    try:
        bench = Bench(folder, config.seed, config.quick)
        with (
            ThreadPoolExecutor(config.jobs) as pool,
            tqdm(total=len(todo), desc="drill", unit="fault", file=sys.stderr) as bar,
        ):

            def one(cell: tuple[Fault, str]) -> Row:
                row = drill(*cell, bench, config.keep)
                bar.update()
                bar.write(f"{row.result} {row.fault}, {row.kind}: {row.seen} ({row.seconds:.0f} s)", file=sys.stderr)
                return row

            return list(pool.map(one, todo))
    finally:
        if not config.keep:
            shutil.rmtree(folder, ignore_errors=True)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| group | fault | kind | promised | seen | | s |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.group, row.fault, row.kind, row.promised, row.seen, row.result, f"{row.seconds:.0f}")
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    counts = {result: sum(row.result == result for row in rows) for result in ("PASS", "FAIL", "SKIP")}
    summary = ", ".join(f"{count} {result}" for result, count in counts.items())
    return "\n".join([*lines, "", f"{quantity(len(rows), 'row')}: {summary}"])


def write_table(rows: Sequence[Row], out_dir: str) -> None:
    """``drill.md`` and ``drill.json`` in a folder."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "drill.md").write_text(table(rows) + "\n", encoding="utf-8")
    (folder / "drill.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
