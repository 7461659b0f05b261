"""Scale: the data of many processes simulated, processes of this machine measured, and the plan of many GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from . import scale_data, scale_exchange, scale_plan, scale_processes


def tables() -> Iterator[str]:
    """What each table assumes, and then the tables."""
    fleet, jobs, cluster = scale_data.Fleet(), scale_processes.Jobs(), scale_plan.Cluster()
    assumed = {"Data": fleet, "Processes": jobs, "Exchange": scale_exchange.ASSUMED, "Plan": cluster}
    yield "\n".join(f"{name}: {text}" for name, text in assumed.items()) + "\n"
    _say("following the data of all processes")
    yield f"Data\n\n{scale_data.tables(fleet)}\n"
    _say("timing jobs of several processes")
    yield f"Processes\n\n{scale_processes.weak_scaling(jobs)}\n"
    _say("tracing the exchange of gradients")
    for text in scale_exchange.tables():
        yield f"Exchange, {text}\n"
    _say("measuring the networks of the presets")
    for text in scale_plan.tables(cluster):
        yield f"Plan, {text}\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
