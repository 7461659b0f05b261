"""Scale, simulated and computed: the data of many processes, and the plan of many GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from . import scale_data, scale_plan


def tables() -> Iterator[str]:
    print("following the data of all processes", file=sys.stderr, flush=True)
    yield scale_data.tables(scale_data.Fleet()) + "\n"
    print("measuring the networks of the presets", file=sys.stderr, flush=True)
    for text in scale_plan.tables(scale_plan.Cluster()):
        yield text + "\n"
