"""Percentiles, defined for every input."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tensorforge.errors import InvalidInputError


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` per cent of `values` lie.

    The result is the value at rank `percent / 100 * (n - 1)`, interpolated linearly between two ranks. Without
    values, or with a NaN among them, the result is NaN, which compares false with every limit. `percent`
    outside 0..100 is an `InvalidInputError`.
    """
    if not 0 <= percent <= 100:
        raise InvalidInputError(f"percent = {percent!r}: must lie between 0 and 100")
    ordered = sorted(values)
    if not ordered or any(math.isnan(value) for value in ordered):
        return math.nan
    rank = percent / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    low, high = ordered[below], ordered[math.ceil(rank)]
    if low == high:
        return low
    return low + (high - low) * (rank - below)
