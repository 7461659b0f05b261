"""Values that are not finite, in the data, the loss or a gradient."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from typing import Any

from script_running import json_lines, losses

from .contract import Group, require
from .inside import Injection
from .place import BATCH, SAVED_EVERY, STEPS, Place
from .processes import SCRIPTS, Job, environment, torchrun

GROUP = Group("numbers")
BAD_STEP = 7
FLIGHT = "flight.jsonl"
DIVERGED = 3  # exit status
WHERE = ("images", "loss", "gradient")
REPLAY_TOLERANCE = 1e-4


def _flight(place: Place) -> list[dict[str, Any]]:
    path = place.logdir / FLIGHT
    require(path.exists(), f"there is no {FLIGHT}")
    return json_lines(path)


def _skips_one(place: Place, where: str, value: str, processes: int) -> str:
    """One rank gets the value; every rank must skip that step, and no other."""
    launcher = torchrun(processes) if processes > 1 else ()
    injection = Injection(where, BAD_STEP, value, rank=processes - 1)
    place.run(injection, launcher=launcher, batch_size=BATCH // processes).succeeded()
    skipped = losses(place.logdir, "skipped_steps")
    require(skipped[BAD_STEP - 1] == 0 and skipped[BAD_STEP] == 1, "the step was not skipped")
    require(skipped[STEPS] == 1, f"{skipped[STEPS]:.0f} steps were skipped")
    bad = [row for row in _flight(place) if row["step"] == BAD_STEP]
    require(len(bad) == 1, f"{FLIGHT} has {len(bad)} rows of step {BAD_STEP}")
    ranks = bad[0]["ranks"]
    lacking = {"position", "t", "loss"} - set.intersection(*(set(rank) for rank in ranks)) | {"grad_norm"} - bad[
        0
    ].keys()
    require(not lacking, f"{FLIGHT} lacks {sorted(lacking)}")
    positions = sorted(position for rank in ranks for position in rank["position"])
    first = (BAD_STEP - 1) * BATCH
    require(positions == list(range(first, first + BATCH)), f"{FLIGHT} names the samples {positions}")
    return f"step {BAD_STEP} skipped by all and recorded"


for _where, _value, _processes in itertools.product(WHERE, ("nan", "inf"), (1, 2)):
    _name = f"{_value} in {_where}" + (" of rank 1 of 2" if _processes > 1 else "")
    _quick = (_value, _processes) in (("nan", 2), ("inf", 1))
    GROUP.fault(_name, f"every rank skips that step alone; {FLIGHT} has it", int(_quick))(
        partial(_skips_one, where=_where, value=_value, processes=_processes)
    )


@GROUP.fault("max_bad_steps reached", "ends naming the reason, the checkpoints intact; then resumes")
def diverged(place: Place) -> str:
    outcome = place.run(Injection("gradient", SAVED_EVERY + 2, "nan", str(STEPS)), max_bad_steps=3)
    place.refused(outcome, "max_bad_steps", status=DIVERGED)
    require(place.saved_step() == SAVED_EVERY, f"the latest checkpoint is of step {place.saved_step()}")
    return f"status {outcome.status}, the reason; {place.continues()}"


@GROUP.fault("replay of a bad step", "scripts/replay.py computes that very step again")
def replay(place: Place) -> str:
    """Every loss of the record must come again. The gradient alone was spoiled, so the step itself is finite."""
    place.run(Injection("gradient", BAD_STEP, "nan")).succeeded()
    (bad,) = (row for row in _flight(place) if row["step"] == BAD_STEP)
    flags = ["--logdir", str(place.logdir), "--step", str(BAD_STEP), "--device", "cpu", "--threads", "1"]
    command = [sys.executable, str(SCRIPTS / "replay.py"), *flags]
    said = Job(command, place.path / "replay.txt", environment()).wait().succeeded()
    (rank,) = bad["ranks"]
    for position, loss in zip(rank["position"], rank["loss"], strict=True):
        cells = [line.split("|") for line in said.output.splitlines() if line.startswith(f"| {position} |")]
        numbers = [float(cell) for row in cells for cell in row if _is_number(cell)]
        again = sum(abs(number - loss) <= REPLAY_TOLERANCE * max(1, abs(loss)) for number in numbers)
        require(again >= 2, f"the loss {loss} of sample {position} is not there as recorded and as computed: {numbers}")
    require("NOT" not in said.output, f"it says otherwise: {said.tail()}")
    return f"{len(rank['loss'])} losses again"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
