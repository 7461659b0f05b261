"""How many threads a process computes with: what its environment says, else its share of the cores of its machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .rendezvous import ProcessInfo

Cores = frozenset[int]  # numbers of those that a process may run on


def own_cores() -> Cores:
    """The cores that this process may run on, all of the machine where the system has no such limits."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def usable_cores(root: str = "/") -> int:
    """Of this machine, as many as this process may use at a time: no more than its control group's quota.

    root: of the file system in which the kernel shows them.
    """
    return max(1, min([len(own_cores()), *(int(quota) for quota in _quotas(Path(root)))]))


def cores_of(rank: int, nodes: Sequence[int], cores: Sequence[Cores], usable: int) -> int:
    """Threads for a process: each core is divided among the processes of its machine that may run on it.

    nodes, cores: the machine of each rank, and the cores that it may run on. usable: ``usable_cores`` of this one,
    whose quota its machine's processes have together.
    """
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    bound = sum(1 / sum(core in cores[other] for other in beside) for core in cores[rank])
    is_limited = usable < len(cores[rank])
    return max(1, int(min(bound, usable / len(beside) if is_limited else bound) + 1e-6))


def threads_said(place: ProcessInfo, env: Mapping[str, str] = os.environ) -> int:
    """The number of threads that the environment asks for; 0 = it says none."""
    if not _is_of_torchrun(place, env):
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            if said := _number(env.get(name, "")):
                return said
    per_task = _number(env.get("SLURM_CPUS_PER_TASK", ""))
    if place.launcher in ("single", "slurm"):
        return per_task
    return max(1, per_task // place.local_size) if per_task and place.launcher == "torchrun" else 0


def _number(text: str) -> int:
    """The first number of a list such as "4,2", which is for nested loops; 0 = none."""
    found = re.match(r"\s*(\d{1,9})\s*(?:,|$)", text)
    return int(found[1]) if found else 0


def _is_of_torchrun(place: ProcessInfo, env: Mapping[str, str]) -> bool:
    """Whether OMP_NUM_THREADS is the 1 that torchrun gives to its processes where nobody has said a number."""
    if place.launcher != "torchrun" or place.local_size < 2 or env.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()  # those that torchrun was started with
    except OSError:
        return False
    return not re.search(rb"(^|\0)OMP_NUM_THREADS=", given)


def _quotas(root: Path) -> Iterator[float]:
    """The cores' worth of time that each control group of this process may take, where one is limited."""
    for folder in _groups(root):
        found = _text(folder / "cpu.max").split()
        found = found or [*_text(folder / "cpu.cfs_quota_us").split(), *_text(folder / "cpu.cfs_period_us").split()]
        if len(found) == 2 and all(word.isdigit() for word in found) and int(found[1]):  # not "max", not -1
            yield int(found[0]) / int(found[1])


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, with those above: of version 2, and of the controller cpu of
    version 1. In a container they may be shown as the root alone."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in {"", controllers, "cpu"} if controllers else {"", "unified"}:
            top = root / "sys/fs/cgroup" / mount
            folder = top / path.strip("/")
            yield from (each for each in (folder, *folder.parents) if each == top or top in each.parents)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
