"""What a machine runs out of: disk space, permissions, open files; and a clock that goes back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .contract import Group, Skipped, require
from .inside import Injection
from .place import SAVED_EVERY, STEPS, Place, is_root

GROUP = Group("machine")
FEW_FILES = (24, 64, 200)  # limits of open files, from too few for anything to enough
BACK = 7 * 24 * 3600.0  # seconds by which the clock goes back


@contextlib.contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own for a folder. Skipped where this user may not mount one."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(folder)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise Skipped(f"a small disk cannot be mounted here: {reason}") from None
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def _fills_up(place: Place, point: str, number: int) -> str:
    """The log directory's disk fills up at a point; after room was made the same command continues."""
    disk = place.path / "disk"
    with _small_disk(disk, "64m"):
        place.logdir = disk / "run"
        outcome = place.run(Injection(point, number, "fill", str(disk)))
        place.refused(outcome, "disk is full")
        place.lost_little(place.logged_step())
        left = [path.name for path in place.logdir.iterdir() if path.name.endswith(".tmp")]
        require(not left, f"temporary files are left: {left}")
        (disk / ".filler").unlink()
        return f"status 2, the reason; {place.continues()}"


@GROUP.fault("disk full in a save", "status 2 and the reason; the same command resumes", quick_kinds=1)
def full_in_save(place: Place) -> str:
    return _fills_up(place, "save", 2)


@GROUP.fault("disk full in the middle of a file", "status 2 and the reason; the same command resumes", every_kind=False)
def full_in_file(place: Place) -> str:
    return _fills_up(place, "checkpoint", 1) if place.quick else _fills_up(place, "sync", 3)


@GROUP.fault("disk full in the log", "status 2 and the reason; the same command resumes", quick_kinds=1)
def full_in_log(place: Place) -> str:
    return _fills_up(place, "log", 2 * (SAVED_EVERY + 2))


@GROUP.fault("files limited to 20 kB (RLIMIT_FSIZE)", "status 2 and the reason; nothing half-written", quick_kinds=1)
def limited_files(place: Place) -> str:
    """What stands in for a full disk where none can be mounted."""
    outcome = place.run(limits={"RLIMIT_FSIZE": 20_000})
    place.refused(outcome, "disk is full")
    require(not list(place.logdir.glob("*.pt")), "a checkpoint file is there")
    return f"status 2, the reason; {place.continues()}"


@GROUP.fault("disk full in the index", "status 2, the reason and the flag", every_kind=False)
def full_in_index(place: Place) -> str:
    place.own_data()
    disk = place.path / "disk"
    with _small_disk(disk, "32k"):
        (disk / ".filler").write_bytes(b"\0" * 28 * 1024)
        outcome = place.run(index_cache=disk)
        place.refused(outcome, "disk is full", "--index_cache")
    return f"status 2, the reason; {place.continues()}"


@GROUP.fault("log directory becomes read-only", "status 2 and the reason; the same command resumes", every_kind=False)
def read_only(place: Place) -> str:
    place.logdir.mkdir()
    injection = Injection("checkpoint", 1, "read_only", str(place.logdir))
    outcome = place.run(injection, launcher=_without_privileges())
    os.chmod(place.logdir, 0o755)
    place.refused(outcome, "permission denied")
    require(place.saved_step() == SAVED_EVERY, f"saved step {place.saved_step()}")
    return f"status 2, the reason; {place.continues()}"


def _without_privileges() -> list[str]:
    """Python without root's right to write everywhere. Skipped where root cannot give it up."""
    if not is_root():
        return [sys.executable]
    if not shutil.which("setpriv"):
        raise Skipped("root may write everywhere, and setpriv is not installed")
    return ["setpriv", "--inh-caps=-all", "--bounding-set=-all", sys.executable]


@GROUP.fault("files from the future, clock set back", "nothing differs", every_kind=False)
def clock(place: Place) -> str:
    """Every file is a week newer than the clock; then the process's own clock goes back a week in mid-run."""
    place.own_data()
    place.run(iterations=SAVED_EVERY).succeeded("the first run failed")
    later = time.time() + BACK
    for path in [place.shards, *place.shards.iterdir(), place.logdir, *place.logdir.iterdir()]:
        os.utime(path, (later, later))
    outcome = place.run(Injection("step", 3, "clock_back", str(BACK))).succeeded()
    require(f"Resuming at step {SAVED_EVERY}" in outcome.output, "it did not resume")
    return place.equal()


@GROUP.fault("few open files allowed (RLIMIT_NOFILE)", "works, or status 2 and the reason", every_kind=False)
def few_files(place: Place) -> str:
    seen = []
    for limit in FEW_FILES:
        for workers in (0, 1):
            place.logdir = place.path / f"run_{limit}_{workers}"
            outcome = place.run(limits={"RLIMIT_NOFILE": limit}, num_workers=workers)
            if outcome.status:
                place.refused(outcome, "open files")
            seen.append(f"{limit} with {workers} workers: status {outcome.status}")
    return f"{', '.join(seen)}; {place.continues()}"


@GROUP.fault("open files used up in mid-run", "saves if it can, status 2 and the reason", every_kind=False)
def no_files(place: Place) -> str:
    injection = Injection("step", SAVED_EVERY + 2, "use_files")
    outcome = place.run(injection, limits={"RLIMIT_NOFILE": 300}, data_timeout=30)
    place.refused(outcome, "open files")
    return f"status 2, the reason; {place.continues()}"


@GROUP.fault("log directory removed", "status 2 and the reason, never a silent restart", every_kind=False)
def removed(place: Place) -> str:
    outcome = place.run(Injection("step", SAVED_EVERY + 2, "remove", str(place.logdir)))
    place.refused(outcome, str(place.logdir))
    require(place.logged_step() < STEPS, "it did not stop")
    shutil.rmtree(place.logdir, ignore_errors=True)
    return f"status 2, the reason; {place.continues()}"
