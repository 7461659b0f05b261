"""What numbers, lists and texts of settings may be.

A setting that sizes a network, an array or a loop declares its upper limit as one of the constants here. They lie far
above what a machine can hold, but low enough that no product of them overflows, so an absurd value is refused in one
sentence. All other settings have the last three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import quantity

MAX_SIDE = 16_384  # pixels
MAX_WIDTH = 65_536  # channels, features, tokens
MAX_FACTOR = 256  # of a width
MAX_BLOCKS = 256  # one after the other
MAX_KERNEL = 255  # pixels
MAX_BATCH = 1_000_000  # samples
MAX_STEPS = 100_000  # of a diffusion, whose tables take about 20 times 8 bytes each
MAX_ROWS = 2**24  # of a table of embeddings
MAX_PROCESSES = 100_000
MAX_SECONDS = 10**7
MAX_SEED = 2**63 - 1  # that torch takes

MAX_NUMBER = 1e12  # in size, without a declared limit
MAX_VALUES = 1_000  # of a list of numbers, without a declared limit
MAX_TEXTS = 100_000  # of a list of texts


@dataclass(frozen=True)
class Bounds:
    """What ``option`` declares of numbers and lists."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    length: int | None = None
    longest: int | None = None
    besides: tuple[float, ...] = ()

    @property
    def rule(self) -> str:
        """Of numbers, such as "must be at least 0 and below 1, or -1"; "" = none is declared."""
        said = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
            "a multiple of": self.multiple_of,
        }
        parts = [f"{words} {_number(bound)}" for words, bound in said.items() if bound is not None]
        if not parts:
            return ""
        listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
        return f"must be {listed}" + "".join(f", or {value:g}" for value in self.besides)

    def of_list(self, values: tuple[Any, ...]) -> Iterator[str]:
        """The rules that a list breaks as a whole."""
        longest = self.longest or (MAX_TEXTS if values and isinstance(values[0], str) else MAX_VALUES)
        if len(values) > longest:
            yield f"must have at most {quantity(longest, 'value')}"
        elif self.length is not None and len(values) not in (0, self.length):
            yield f"must have {quantity(self.length, 'value')}"

    def of_value(self, value: Any) -> Iterator[str]:
        """The rules that a number, a text, or one in a nested list breaks; a value of another type breaks none."""
        if isinstance(value, tuple):
            for each in value:
                yield from self.of_value(each)
        elif isinstance(value, str):
            yield from _of_text(value)
        elif isinstance(value, (int, float)) and not self._allow(value):
            yield self.rule
        elif isinstance(value, (int, float)) and self._is_absurd(value):
            yield f"must be at most {_number(MAX_NUMBER)} in size"

    def _is_absurd(self, value: float) -> bool:
        """Whether a number is beyond the limits that hold where none is declared."""
        has_limit = self.most is not None or self.below is not None
        return value < -MAX_NUMBER or (value > MAX_NUMBER and not has_limit)

    def _allow(self, value: float) -> bool:
        return value in self.besides or not (
            (self.least is not None and not value >= self.least)
            or (self.above is not None and not value > self.above)
            or (self.most is not None and not value <= self.most)
            or (self.below is not None and not value < self.below)
            or (self.multiple_of is not None and value % self.multiple_of != 0)
        )


def _of_text(text: str) -> Iterator[str]:
    if "\0" in text:
        yield "must not hold a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        yield "must be text that UTF-8 can hold, without halves of surrogate pairs or bytes of other encodings"


def _number(bound: float) -> str:
    return f"{bound:g}" if abs(bound) < 10_000 else f"{bound:,.0f}"
