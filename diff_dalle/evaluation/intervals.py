"""Intervals of proportions, means and ratios of means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import InputError

Z_95 = 1.959964  # the normal distribution's 97.5 % point: 95 % two-sided


def wilson(right: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """The interval that holds the true proportion after ``right`` successes in ``n`` trials (Wilson 1927).

    Unlike the textbook interval it stays inside [0, 1] and is honest at 0 and at n successes. n = 0 gives (0, 1).
    """
    if n == 0:
        return 0.0, 1.0
    share, spread = right / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], z: float = Z_95) -> tuple[float, float]:
    """The normal interval of the mean of what ``values``, at least 2, were drawn from: mean ± z s / √n."""
    if len(values) < 2:
        raise InputError(f"an interval needs at least 2 pictures, not {len(values)}; give more")
    mean, half = float(np.mean(values)), z * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def ratio_interval(values: Sequence[float], others: Sequence[float], z: float = Z_95) -> tuple[float, float]:
    """The interval of mean(values) / mean(others), pairs from the same pictures, at least 2.

    The ratio is linearised around the two means (the delta method). Unlike the mean of single ratios it bears pictures
    in which ``others`` is 0.
    """
    values, others = np.asarray(values, np.float64), np.asarray(others, np.float64)
    ratio = values.mean() / others.mean()
    low, high = mean_interval((values - ratio * others) / others.mean(), z)
    return float(ratio + low), float(ratio + high)
