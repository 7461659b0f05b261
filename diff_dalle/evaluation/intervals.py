"""95 % confidence intervals of proportions, means and ratios of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import InputError

Z_95 = 1.959964  # 97.5 % quantile of the normal distribution: 95 %, two-sided


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def interval(self, digits: int) -> str:
        return f"{self.low:.{digits}f} – {self.high:.{digits}f}"

    def text(self, digits: int) -> str:
        """The interval is omitted if its width is 0."""
        value = f"{self.value:.{digits}f}"
        return value if self.low == self.high else f"{value} ({self.interval(digits)})"


@dataclass(frozen=True)
class Fraction(Estimate):
    """A fraction in [0, 1] of n images."""

    n: int


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Score interval of a proportion after ``successes`` in ``n`` trials (Wilson 1927).

    Unlike the normal interval it lies in [0, 1] and has a width at 0 and at n successes. n = 0 gives (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, Z_95 * Z_95 / n
    center = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, center - half), min(1.0, center + half)


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Normal interval of a mean: mean ± 1.96 s / √n. values: one per image. InputError for fewer than 2."""
    if len(values) < 2:
        raise InputError(f"a confidence interval needs at least 2 images, not {len(values)}; pass more")
    mean, half = float(np.mean(values)), Z_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def ratio_interval(
    numerators: Sequence[float] | np.ndarray, denominators: Sequence[float] | np.ndarray
) -> tuple[float, float]:
    """Interval of mean(numerators) / mean(denominators), one pair per image. InputError for fewer than 2.

    The ratio is linearized around the two means (delta method). Unlike the mean of the single ratios it is defined for
    images whose denominator is 0.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    ratio = float(above.mean() / below.mean())
    low, high = mean_interval((above - ratio * below) / below.mean())
    return ratio + low, ratio + high
