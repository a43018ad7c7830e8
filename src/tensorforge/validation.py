"""Checks of single values: whole number, finite number, member of an enum, one of a few, yes or no.

Each check returns the value if it keeps the rule, and otherwise raises a `ConfigurationError` that names
the field, the value and the rule. A boolean is never a number.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum
from numbers import Real
from typing import TypeGuard, TypeVar

from tensorforge.errors import ConfigurationError

Value = TypeVar("Value")
Member = TypeVar("Member", bound=Enum)


def is_whole_number(value: object) -> TypeGuard[int]:
    """Whether the value is an `int` and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is an `int` or a `float`, also NaN or infinite, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole_number(
    field: str, value: object, *, least: int | None = None, most: int | None = None
) -> int:
    """A whole number between `least` and `most`, both included."""
    if not is_whole_number(value):
        raise ConfigurationError(field, value, "must be a whole number")
    if least is not None and value < least:
        raise ConfigurationError(field, value, f"must be at least {least}")
    if most is not None and value > most:
        raise ConfigurationError(field, value, f"must be at most {most}")
    return value


def finite_number(
    field: str, value: float, *, least: float | None = None, above: float | None = None
) -> float:
    """A number (also one of numpy's), not NaN, not infinite, not below `least`, greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigurationError(field, value, "must be a finite number")
    if least is not None and value < least:
        raise ConfigurationError(field, value, f"must be at least {least:g}")
    if above is not None and value <= above:
        raise ConfigurationError(field, value, f"must be more than {above:g}")
    return value


def one_of(field: str, value: Value, choices: Collection[Value]) -> Value:
    """One of the few values that are allowed."""
    if value not in choices:
        names = ", ".join(str(choice) for choice in choices)
        raise ConfigurationError(field, value, f"must be one of {names}")
    return value


def member(field: str, value: object, kind: type[Member]) -> Member:
    """A member of the enum, not just its value."""
    if not isinstance(value, kind):
        names = ", ".join(f"{kind.__name__}.{choice.name}" for choice in kind)
        raise ConfigurationError(field, value, f"must be one of {names}")
    return value


def flag(field: str, value: object) -> bool:
    """`True` or `False`."""
    if not isinstance(value, bool):
        raise ConfigurationError(field, value, "must be True or False")
    return value
