"""Version numbers of models: three whole numbers, ordered, each from 0 to 2³² - 1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from tensorforge.errors import InvalidInputError
from tensorforge.validation import is_whole_number

MAX_PART = 2**32 - 1

# Leading zeros are refused, so that every version has exactly one spelling.
_PLAIN = re.compile(r"(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})")


class Bump(Enum):
    """Which part of the version a change calls for, the smallest first."""

    PATCH = "patch"
    MINOR = "minor"
    MAJOR = "major"


@dataclass(frozen=True, slots=True, order=True)
class ModelVersion:
    """A version, ordered by major, then minor, then patch. `str()` gives `major.minor.patch`."""

    major: int
    minor: int
    patch: int

    def __post_init__(self) -> None:
        for field in ("major", "minor", "patch"):
            value = getattr(self, field)
            if not is_whole_number(value):
                raise InvalidInputError(f"{field} = {value!r}: must be a whole number")
            if not 0 <= value <= MAX_PART:
                raise InvalidInputError(f"{field} = {value}: must lie between 0 and {MAX_PART}")

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def parts(self) -> tuple[int, int, int]:
        """The three numbers."""
        return (self.major, self.minor, self.patch)

    def next(self, bump: Bump) -> ModelVersion:
        """The version that follows after a change of this size.

        A part that is already at its maximum is an `InvalidInputError`: versions never wrap around.
        """
        if bump is Bump.MAJOR:
            return ModelVersion(self.major + 1, 0, 0)
        if bump is Bump.MINOR:
            return ModelVersion(self.major, self.minor + 1, 0)
        return ModelVersion(self.major, self.minor, self.patch + 1)


def compare_versions(a: ModelVersion, b: ModelVersion) -> int:
    """-1 if `a` comes before `b`, 0 if they are equal, 1 if it comes after."""
    return (a > b) - (a < b)


def parse_version(text: str) -> ModelVersion | None:
    """Read `major.minor.patch`: three plain decimal numbers, and nothing else.

    Anything else is `None`: signs, spaces, leading zeros, other digits, a missing or a fourth part, a
    number above 2³² - 1.
    """
    match = _PLAIN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    major, minor, patch = (int(part) for part in match.groups())
    if max(major, minor, patch) > MAX_PART:
        return None
    return ModelVersion(major, minor, patch)


def require_version(text: str) -> ModelVersion:
    """Like `parse_version`, but what is not a version is an `InvalidInputError`."""
    version = parse_version(text)
    if version is None:
        raise InvalidInputError(
            f"{str(text)[:60]!r} is not a version; write three numbers, like 1.2.0"
        )
    return version


def format_version(version: ModelVersion) -> str:
    """`major.minor.patch`; `parse_version` reads it back."""
    return str(version)
