"""Compare what must not change with the record of it in ``found``: print the differences, and end with status 1 if
there are any. ``--update`` writes them into the record. NAME selects recordings by a part of their names."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import documented
import mistakes
import tiny_runs
from workspace import CHECKPOINTS, RECORD, Workspace

FOUND = RECORD / "found"
NUMBERS = re.compile(r"(?m)^([~≈] .*): (.*)$")
CLOSE = {"~": 1e-3, "≈": 1e-2}  # of the largest number of a line, by its mark
RECORDINGS = {**documented.recordings(), **tiny_runs.recordings(), **mistakes.recordings()}


def is_close(found: str, recorded: str, limit: float) -> bool:
    """Whether two texts hold the same count of numbers, and nearly the same ones."""
    found_, recorded_ = ([float(word) for word in text.split()] for text in (found, recorded))
    limit *= max(map(abs, recorded_), default=0)
    return len(found_) == len(recorded_) and all(
        abs(a - b) <= limit or (math.isnan(a) and math.isnan(b)) for a, b in zip(found_, recorded_, strict=True)
    )


def settled(text: str, record: str) -> str:
    """``text`` with the numbers of the record in lines such as ``~ NAME: NUMBERS`` that are close."""
    known = defaultdict(list)  # by name, of several of one name the first last
    for name, recorded in reversed(NUMBERS.findall(record)):
        known[name].append(recorded)

    def settle(line: re.Match) -> str:
        name, found = line[1], line[2]
        recorded = known[name].pop() if known[name] else ""
        return f"{name}: {recorded}" if recorded and is_close(found, recorded, CLOSE[name[0]]) else line[0]

    return NUMBERS.sub(settle, text)


def record_of(name: str) -> str:
    path = FOUND / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def differences(name: str, workspace: Workspace, update: bool = False) -> str:
    """A unified diff from the record to what is found now; update: write it into the record."""
    record, path = record_of(name), FOUND / name
    text = settled(RECORDINGS[name](workspace), record)
    if update and text != record:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    parts = (part.splitlines(keepends=True) for part in (record, text))
    return "".join(difflib.unified_diff(*parts, f"recorded/{name}", f"now/{name}"))


def forgotten() -> list[str]:
    """Files of the record that nothing makes."""
    files = (path.relative_to(FOUND).as_posix() for path in FOUND.rglob("*.txt"))
    return sorted(file for file in files if file not in RECORDINGS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the differences into the record")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of recordings; default all")
    flags, changed, failed = parser.parse_args(), False, False
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        for name in tiny_runs.RUNS if flags.update else ():
            if not (CHECKPOINTS / f"{name}.tar.xz").exists():
                tiny_runs.make_checkpoint(name, workspace)
        for name in RECORDINGS:
            if not flags.names or any(part in name for part in flags.names):
                try:
                    text = differences(name, workspace, flags.update)
                except AssertionError as error:  # a command that must succeed
                    text, failed = f"{name} cannot be taken: {error}\n", True
                sys.stdout.write(text)
                changed = changed or bool(text)
    for name in forgotten():
        print(f"nothing makes {FOUND.name}/{name}")
        if flags.update:
            (FOUND / name).unlink()
        changed = True
    sys.exit(1 if failed or (changed and not flags.update) else 0)


if __name__ == "__main__":
    main()
