"""Networks of the demo that are trained side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .contract import Demo, Job


@dataclass(frozen=True)
class Network:
    """How one of them is trained.

    data:  folders with its shards for training and held-out loss.
    first: a folder with shards to begin on, and for how many steps; it goes on when all others have been trained.
    flags: beside the preset's settings. iterations: instead of the preset's; quick: those of the quick demo.
    after: the networks that are trained before it.
    """

    script: str
    preset: str
    data: tuple[Path, Path]
    quick: int
    iterations: int | None = None
    flags: tuple[object, ...] = ()
    after: tuple[str, ...] = ()
    first: tuple[Path, int] | None = None


def training_jobs(
    demo: Demo, networks: Mapping[str, Network], folders: Mapping[str, Path], common: tuple[object, ...] = ()
) -> dict[str, Job]:
    """The jobs that train networks, by name. folders: their log directories; common: flags of all."""
    jobs: dict[str, Job] = {}
    for name, how in networks.items():
        iterations, after = how.quick if demo.quick else how.iterations, how.after
        flags: list[object] = ["--preset", how.preset, "--logdir", folders[name], *common]
        flags += ["--val_data_dir", how.data[1], *how.flags]
        if how.first:
            data, steps = how.first
            begin = ["--data_dir", data, "--iterations", how.quick // 2 if demo.quick else steps]
            jobs[f"{name}_first"] = Job(how.script, [*flags, *begin], after, shown=True)
            after = (f"{name}_first", *(other for other in networks if other != name))
            flags += ["--accept_changed_data", True] if data != how.data[0] else []
        flags += ["--data_dir", how.data[0], *(["--iterations", iterations] if iterations else [])]
        jobs[name] = Job(how.script, flags, after)
    return jobs


def trained_file(logdir: Path) -> Path:
    """A run's best checkpoint, or its last EMA where it keeps no best one."""
    *_, last = [*sorted(logdir.glob("ema_*.pt")), *logdir.glob("best.pt")]
    return last
