"""Shards change under a run, and workers die."""

from __future__ import annotations

from functools import partial

from .contract import Group
from .inside import Injection
from .place import SAVED_EVERY, STEPS, Place

GROUP = Group("data")
AT_STEP = SAVED_EVERY + 2
MANY_STEPS = 40  # more than are prepared when the shards change
CHANGES = {
    "truncate": "truncated",
    "rewrite": "rewritten in place",
    "delete": "deleted",
    "fifo": "replaced by FIFOs",
    "folder": "replaced by folders",
}
TIMEOUT = 20  # --data_timeout, in seconds
STUCK = 60.0  # seconds within which a stuck worker must be named


def _changes(place: Place, action: str) -> str:
    """All shards change at once; then the original files come back, and the same command continues."""
    data = place.own_data()
    injection = Injection("step", AT_STEP, action, str(data))
    outcome = place.run(injection, num_workers=2, prefetch=1, iterations=MANY_STEPS)
    if outcome.status == 0:
        return f"read on from the open files, {place.equal(iterations=MANY_STEPS)}"
    place.refused(outcome, ".tar")
    step = place.saved_all()
    place.restore_data()
    return f"status 2, the shard named, saved at {step}; {place.continues(iterations=MANY_STEPS)}"


for _action, _how in CHANGES.items():
    _promised = "reads on unharmed, or saves and ends naming the shard; never other data"
    GROUP.fault(f"shards {_how} in mid-run", _promised, every_kind=False)(partial(_changes, action=_action))


@GROUP.fault("a data worker killed, as by the OOM killer", "saves, ends, names it; the same command resumes")
def worker_killed(place: Place) -> str:
    outcome = place.run(Injection("chunk", STEPS - 4, "kill"))
    place.refused(outcome, "data worker")
    step = place.saved_all()
    return f"status 2, saved at {step}; {place.continues()}"


@GROUP.fault("a data worker stopped", f"ends within {STUCK:.0f} s, names it, saves", quick_kinds=0, every_kind=False)
def worker_stopped(place: Place) -> str:
    outcome = place.start(Injection("chunk", STEPS - 4, "stop"), data_timeout=TIMEOUT).wait(STUCK)
    place.refused(outcome, "worker")
    step = place.saved_all()
    return f"status 2 after {outcome.seconds:.0f} s, saved at {step}; {place.continues()}"
