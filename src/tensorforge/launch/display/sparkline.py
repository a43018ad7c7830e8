"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_NOT_A_NUMBER = "!"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` in at most `width` characters; several that share one are averaged.

    Values that are not finite show as `!` and do not stretch the scale.
    """
    if width <= 0 or not values:
        return ""
    columns = _columns(values, min(width, len(values)))
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return _NOT_A_NUMBER * len(columns)
    low, high = min(finite), max(finite)
    return "".join(_bar(value, low, high) for value in columns)


def _columns(values: Sequence[float], width: int) -> list[float]:
    cuts = [len(values) * column // width for column in range(width + 1)]
    return [_mean(values[start:stop]) for start, stop in itertools.pairwise(cuts)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values) if _finite(values) else math.nan


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_A_NUMBER
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
    return _BARS[max(0, min(len(_BARS) - 1, round(share * (len(_BARS) - 1))))]
