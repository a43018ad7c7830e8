"""Versions of models: major, minor and patch, each from 0 to 2³² - 1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from tensorforge.errors import InvalidInputError
from tensorforge.validation import is_whole_number

MAX_PART = 2**32 - 1

# Leading zeros are refused, so that every version has exactly one text.
_PLAIN = re.compile(r"(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9})")


class Bump(Enum):
    """The part of a version that a change increases, the smallest change first."""

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
        """Major, minor and patch."""
        return (self.major, self.minor, self.patch)

    def next(self, bump: Bump) -> ModelVersion:
        """The version after a change of this size; `InvalidInputError` if the part is at its maximum."""
        if bump is Bump.MAJOR:
            return ModelVersion(self.major + 1, 0, 0)
        if bump is Bump.MINOR:
            return ModelVersion(self.major, self.minor + 1, 0)
        return ModelVersion(self.major, self.minor, self.patch + 1)


def compare_versions(a: ModelVersion, b: ModelVersion) -> int:
    """-1 if `a` is lower than `b`, 0 if they are equal, 1 if `a` is higher."""
    return (a > b) - (a < b)


def parse_version(text: str) -> ModelVersion | None:
    """The version that a text like `1.2.0` describes, or `None` if the text is no version.

    The text must be three decimal numbers and two dots: no signs, no spaces, no leading zeros, no digits other
    than 0 to 9, no number above 2³² - 1.
    """
    match = _PLAIN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    major, minor, patch = (int(part) for part in match.groups())
    if max(major, minor, patch) > MAX_PART:
        return None
    return ModelVersion(major, minor, patch)


def require_version(text: str) -> ModelVersion:
    """Like `parse_version`, but `InvalidInputError` if the text is no version."""
    version = parse_version(text)
    if version is None:
        raise InvalidInputError(
            f"{str(text)[:60]!r} is not a version; write three numbers, like 1.2.0"
        )
    return version


def format_version(version: ModelVersion) -> str:
    """The version as text, which `parse_version` reads."""
    return str(version)
