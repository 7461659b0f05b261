"""Values that are not finite, in the data, the loss or a gradient."""

from __future__ import annotations

import json
from typing import Any

from .contract import Group, require
from .inside import Injection
from .place import SAVED_EVERY, STEPS, Place
from .processes import SCRIPTS, Job, environment, torchrun

GROUP = Group("numbers")
BAD_STEP = 7
FLIGHT = "flight.jsonl"
WHERE = ("images", "loss", "gradient")
REPLAY_TOLERANCE = 1e-4


def _flight(place: Place) -> list[dict[str, Any]]:
    path = place.logdir / FLIGHT
    require(path.exists(), f"there is no {FLIGHT}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _skips_one(place: Place, where: str, value: str, processes: int) -> str:
    """One rank gets the value; every rank must skip that step, and no other."""
    launcher = torchrun(processes) if processes > 1 else ()
    injection = Injection(where, BAD_STEP, value, rank=processes - 1)
    outcome = place.run(injection, launcher=launcher, batch_size=8 // processes)
    require(outcome.status == 0, f"it failed: {outcome.tail()}")
    rows = [json.loads(line) for line in (place.logdir / "progress.jsonl").read_text().splitlines()]
    skipped = {row["step"]: row["skipped_steps"] for row in rows if "skipped_steps" in row}
    require(skipped[BAD_STEP - 1] == 0 and skipped[BAD_STEP] == 1, "the step was not skipped")
    require(skipped[STEPS] == 1, f"{skipped[STEPS]:.0f} steps were skipped")
    bad = [row for row in _flight(place) if row["step"] == BAD_STEP]
    require(len(bad) == 1, f"{FLIGHT} has {len(bad)} rows of step {BAD_STEP}")
    missing = {"samples", "t", "loss", "grad_norm"} - bad[0].keys()
    require(not missing, f"{FLIGHT} lacks {sorted(missing)}")
    require(len(bad[0]["samples"]) == 8, f"{FLIGHT} names {len(bad[0]['samples'])} of 8 samples")
    return f"step {BAD_STEP} skipped by all and recorded"


def _register(where: str, value: str, processes: int, quick_kinds: int) -> None:
    def drill(place: Place) -> str:
        return _skips_one(place, where, value, processes)

    of = f" of rank {processes - 1} of {processes}" if processes > 1 else ""
    name = f"{value} in {where}{of}"
    GROUP.fault(name, f"every rank skips that step alone; {FLIGHT} has it", quick_kinds)(drill)


for _where in WHERE:
    for _value in ("nan", "inf"):
        for _processes in (1, 2):
            _quick = (_value, _processes) in (("nan", 2), ("inf", 1))
            _register(_where, _value, _processes, int(_quick))


@GROUP.fault("max_bad_steps reached", "ends naming the reason, the checkpoints intact; then resumes")
def diverged(place: Place) -> str:
    outcome = place.run(Injection("gradient", SAVED_EVERY + 2, "nan", str(STEPS)), max_bad_steps=3)
    require(not outcome.has_traceback, f"a traceback: {outcome.tail(800)}")
    require(outcome.status not in (0, 1), f"status {outcome.status}")
    require("max_bad_steps" in " ".join(outcome.errors), f"the reason is missing: {outcome.tail()}")
    require(place.saved_step() == SAVED_EVERY, f"the latest checkpoint is of step {place.saved_step()}")
    return f"status {outcome.status}, the reason; {place.continues()}"


@GROUP.fault("replay of a bad step", "scripts/replay.py computes that very step again")
def replay(place: Place) -> str:
    """The pixel that was not finite is not in the data, so the step comes out finite with the same samples and t."""
    outcome = place.run(Injection("gradient", BAD_STEP, "nan"))
    require(outcome.status == 0, f"it failed: {outcome.tail()}")
    (bad,) = (row for row in _flight(place) if row["step"] == BAD_STEP)
    script = SCRIPTS / "replay.py"
    require(script.exists(), "there is no scripts/replay.py")
    command = [*torchrun(1)[:1], str(script), "--logdir", str(place.logdir), "--step", str(BAD_STEP)]
    said = Job(command, place.path / "replay.txt", environment()).wait()
    require(said.status == 0, f"it failed: {said.tail()}")
    numbers = [float(word) for word in said.output.replace(",", " ").split() if _is_number(word)]
    loss = bad["loss"] if isinstance(bad["loss"], float) else sum(bad["loss"]) / len(bad["loss"])
    near = [number for number in numbers if abs(number - loss) <= REPLAY_TOLERANCE * max(1, abs(loss))]
    require(bool(near), f"the loss {loss} is not in {said.tail()}")
    return f"loss {loss:.4f} again"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
