"""Intervals of proportions."""

from __future__ import annotations

import math

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
