"""What a fault of the drill is, and the two ways in which one does not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Drill = Callable[[Any], str]  # of a Place, whose module imports this one


class Deviation(Exception):
    """Something other than promised was seen; the message says what."""


class Skipped(Exception):
    """The fault cannot be injected on this machine; the message says why."""


@dataclass(frozen=True)
class Fault:
    """A fault and what is promised about it.

    drill: injects the fault for real and returns what was seen. Raises Deviation where the promise is broken, Skipped
           where the fault cannot be injected.
    quick_kinds: number of kinds of networks that the quick form drills it with; 0 = it is left to the long form.
    every_kind: whether it depends on what is trained. If so, the long form drills it with all kinds, else with one.
    """

    group: str
    name: str
    promised: str
    drill: Drill
    quick_kinds: int
    every_kind: bool


@dataclass
class Group:
    """The faults of one file, in order; ``fault`` registers them."""

    name: str
    faults: list[Fault] = field(default_factory=list)

    def fault(self, name: str, promised: str, quick_kinds: int = 1, every_kind: bool = True):
        def register(drill: Drill) -> Drill:
            self.faults.append(Fault(self.name, name, promised, drill, quick_kinds, every_kind))
            return drill

        return register


def require(holds: bool, otherwise: str) -> None:
    """Raise Deviation with the text ``otherwise`` unless the condition holds."""
    if not holds:
        raise Deviation(otherwise)
