"""One of several processes is killed, stopped or raises: the others must not wait for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from functools import partial

from forking import srun

from .contract import Group, require
from .inside import Injection
from .place import Place
from .processes import Job, is_running, mpiexec, torchrun

GROUP = Group("ranks")
ENDED_WITHIN = 30.0  # seconds after a rank was killed or raised
TIMEOUT = 20.0  # seconds that a stopped rank may be waited for; given as --timeout
GLOBAL_BATCH = 24  # divides among one, two and three ranks
AT_STEP = 7  # after the first checkpoint
ON_ONE = 10  # the step until which the run continues on one rank


def _start(place: Place, launcher: str, processes: int, *injections: Injection, **flags) -> list[Job]:
    """One job, or under srun, which starts every process of a step itself, one for each rank."""
    flags = {"batch_size": GLOBAL_BATCH // processes, **flags}
    if launcher != "srun":
        words = {"mpiexec": mpiexec, "torchrun": torchrun}[launcher](processes)
        return [place.start(*injections, launcher=words, **flags)]
    return [place.start(*injections, env=own, **flags) for own in srun(processes)]


def _pids(place: Place) -> dict[int, int]:
    """Process by rank, of those that have reached the first step."""
    return {int(path.name): int(path.read_text()) for path in (place.path / "pids").iterdir()}


def _fault(place: Place, launcher: str, processes: int, victim: int, action: str) -> str:
    """Inject the fault; the others must end in time and name the rank. Then continue on one rank, and on all."""
    (place.path / "pids").mkdir()
    happened, limit = place.path / "happened", TIMEOUT + ENDED_WITHIN if action == "stop" else ENDED_WITHIN
    jobs = _start(
        place,
        launcher,
        processes,
        Injection("step", 1, "pid", str(place.path / "pids")),
        Injection("step", AT_STEP, "touch", str(happened), victim),
        Injection("step", AT_STEP, action, "", victim),
        timeout=TIMEOUT,
    )
    require(jobs[0].wait_until(happened.exists, "the fault"), f"it ended before the fault: {jobs[0].text()[-400:]}")
    since, pids = time.monotonic(), _pids(place)
    others = [pid for rank, pid in pids.items() if rank != victim]
    while any(is_running(pid) for pid in others):
        if time.monotonic() - since > limit:
            said = " ".join(job.text()[-300:] for job in jobs)
            for job in jobs:
                job.end()
            require(False, f"the others still ran {limit:.0f} s later: {said}")
        time.sleep(0.05)
    seconds = time.monotonic() - since
    with contextlib.suppress(ProcessLookupError):
        if action == "stop":
            os.kill(pids[victim], signal.SIGKILL)
    outcomes = [job.wait() for job in jobs]
    require(all(outcome.status != 0 for outcome in outcomes), "a status was 0")
    said = "\n".join(outcome.output for outcome in outcomes)
    named = _is_named(victim, said)
    cut_off = launcher == "mpiexec" and action == "kill" and "BAD TERMINATION" in said
    require(named or cut_off, f"rank {victim} is not named: {outcomes[0].tail()}")
    how = f"ended after {seconds:.0f} s{'' if named else ' by mpiexec, which names nobody'}"
    return f"{how}; {_continue(place, launcher, processes)}"


def _is_named(rank: int, said: str) -> bool:
    """Whether another rank, the rank itself or torchrun says which one failed."""
    ours = rf"rank \d+ stops because .*\brank {rank}\b|^(error: )?rank {rank}:"
    return re.search(rf"{ours}|rank +: {rank} ", said, re.MULTILINE) is not None


def _continue(place: Place, launcher: str, processes: int) -> str:
    place.run(batch_size=GLOBAL_BATCH, iterations=ON_ONE).succeeded("it does not continue on one rank")
    for job in _start(place, launcher, processes):
        job.wait().succeeded(f"it does not continue on {processes} ranks")
    return f"continued on 1 and {processes}, {place.close(batch_size=GLOBAL_BATCH)}"


def _register(launcher: str, processes: int, victim: int, action: str, quick_kinds: int) -> None:
    verb = {"kill": "killed", "stop": "stopped", "raise": "raises"}[action]
    within = f"{ENDED_WITHIN:.0f} s" if action != "stop" else "the time-out"

    name = f"{launcher}: rank {victim} of {processes} {verb}"
    unless = ", unless mpiexec ends them first" if (launcher, action) == ("mpiexec", "kill") else ""
    promised = f"the others end within {within} and name it{unless}; goes on with 1 and {processes}"
    fault = partial(_fault, launcher=launcher, processes=processes, victim=victim, action=action)
    GROUP.fault(name, promised, quick_kinds, every_kind=processes == 2)(fault)


QUICK: Sequence[tuple[str, int, int, str]] = (
    ("mpiexec", 2, 1, "kill"),
    ("torchrun", 2, 1, "raise"),
    ("srun", 2, 1, "kill"),
    ("srun", 2, 0, "stop"),
    ("torchrun", 3, 2, "kill"),
)
for _launcher in ("mpiexec", "torchrun", "srun"):
    for _processes, _victim in ((2, 1), (2, 0), (3, 2)):
        for _action in ("kill", "stop", "raise"):
            _case = (_launcher, _processes, _victim, _action)
            _register(*_case, quick_kinds=int(_case in QUICK))
