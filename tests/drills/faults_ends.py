"""The run ends at any moment: killed, asked to stop, or cut off by a power failure."""

from __future__ import annotations

import signal
import time

from .contract import Group, require
from .inside import Injection
from .place import SAVED_EVERY, STEPS, Place

GROUP = Group("ends")
KILLS, QUICK_KILLS = 20, 7
CUTS, QUICK_CUTS = 6, 2
# Points at which a process kills itself, with the largest count of passes after which it does.
MOMENTS = {
    "index": 4,
    "chunk": 4,
    "step": SAVED_EVERY + 2,
    "log": SAVED_EVERY + 2,
    "save": 1,
    "write": 400,
    "rename": 4,
    "renamed": 4,
    "sync": 4,
    "checkpoint": 1,
}
EXITS_BY_SIGNAL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def _kill_once(place: Place, moment: str, **flags) -> bool:
    """Start the run and kill it at a random moment; whether it was killed before its end."""
    if moment == "clock":
        job = place.start(**flags)
        deadline = time.monotonic() + place.random.uniform(0, 8)
        job.wait_until(lambda: time.monotonic() > deadline, "the moment of the kill")
        job.signal(signal.SIGKILL)
        outcome = job.wait()
    else:
        outcome = place.run(Injection(moment, place.random.randint(1, MOMENTS[moment]), "kill"), **flags)
    if moment == "chunk":  # the worker is killed, and the run ends because of it
        require(outcome.status in (0, 2), f"status {outcome.status} after a killed worker: {outcome.tail()}")
    else:
        require(outcome.status in (0, -signal.SIGKILL), f"status {outcome.status}: {outcome.tail()}")
    return outcome.without_traceback().status != 0


@GROUP.fault("SIGKILL at random moments", "the same command ends with the same weights", quick_kinds=3)
def sigkill(place: Place) -> str:
    """A chain of kills: every start may be killed, in the index, a worker, a step, the log, or in saving."""
    wanted = QUICK_KILLS if place.quick else KILLS
    place.own_data()  # so that its index is built, and killed while it is
    moments = [*MOMENTS, "clock"]
    place.random.shuffle(moments)
    kills, ended, most_lost = 0, True, 0
    for number in range(10 * wanted):
        if kills == wanted:
            break
        before = 0 if ended else place.saved_step()
        killed = _kill_once(place, moments[number % len(moments)])
        kills += killed
        done, step = max(before, place.logged_step()), place.saved_step()
        require(step >= before, f"the checkpoint of step {before} is lost")
        place.lost_little(done)
        most_lost = max(most_lost, done - step)
        ended = not killed
        if ended:
            place.equal()
            place.logdir.rename(place.path / f"ended_{number}")
    require(kills == wanted, f"only {kills} kills")
    if ended:
        return f"{kills} kills, at most {most_lost} steps lost, equal"
    return f"{kills} kills, at most {most_lost} steps lost; {place.continues()}"


@GROUP.fault(
    "SIGTERM, SIGUSR1, Ctrl-C", "save, leave with an exit code of their own, the same command resumes", quick_kinds=1
)
def signals(place: Place) -> str:
    seen = {}
    for number in EXITS_BY_SIGNAL:
        place.logdir = place.path / number.name
        job = place.start(Injection("step", STEPS - 2, "sleep", "1"))
        job.wait_until(lambda: place.logged_step() >= STEPS - 3, f"step {STEPS - 3}")
        job.signal(number)
        outcome = job.wait().without_traceback()
        require(place.saved_all() < STEPS, f"{number.name}: it did not stop")
        seen[number.name] = outcome.status
        place.continues()
    own = set(seen.values())
    text = ", ".join(f"{name} → {status}" for name, status in seen.items())
    require(len(own) == len(seen) and not own & {0, 1, 2}, f"exit codes are not their own: {text}")
    return f"{text}; all resumed, equal"


@GROUP.fault("SIGTERM while waiting for data", "saves and leaves within 30 s", quick_kinds=1, every_kind=False)
def signal_while_waiting(place: Place) -> str:
    job = place.start(Injection("chunk", 7, "sleep"))  # the worker prepares six batches, then nothing more
    job.wait_until(lambda: place.logged_step() >= 5, "step 5")
    time.sleep(1)
    sent = time.monotonic()
    job.signal(signal.SIGTERM)
    outcome = job.wait(60).without_traceback()
    seconds = time.monotonic() - sent
    place.saved_all()
    require(seconds <= 30, f"left after {seconds:.0f} s")
    return f"status {outcome.status} after {seconds:.0f} s; {place.continues()}"


@GROUP.fault("power failure during a save", "falls back to the checkpoint before, and says so", quick_kinds=1)
def power_failure(place: Place) -> str:
    """The files of the latest checkpoint are cut, as by a disk that reordered its writes."""
    place.run().succeeded("the first run failed")
    latest = sorted(place.logdir.glob(f"*{STEPS:06d}.pt"))
    cuts = QUICK_CUTS if place.quick else CUTS
    for number in range(cuts):
        path = latest[number % len(latest)]
        whole = path.read_bytes()
        path.write_bytes(whole[: place.random.randrange(len(whole))])
        (place.logdir / f".{path.name}.1.abcd.tmp").write_bytes(whole[:100])
        outcome = place.run().succeeded(f"{path.name} cut")
        before = STEPS - SAVED_EVERY
        require(f"Resuming at step {before}" in outcome.output, f"{path.name} cut: {outcome.tail()}")
        require(path.name in outcome.output, f"the damaged file is not named: {outcome.tail()}")
        place.equal()
    return f"{cuts} cuts; resumed at step {before}, equal"


@GROUP.fault("power failure, no checkpoint left whole", "one sentence, never a silent restart", every_kind=False)
def nothing_left(place: Place) -> str:
    place.run().succeeded("the first run failed")
    for path in place.logdir.glob("*.pt"):
        whole = path.read_bytes()
        path.write_bytes(whole[: place.random.randrange(len(whole))])
    outcome = place.run()
    place.refused(outcome, ".pt")
    return "status 2, the reason"
