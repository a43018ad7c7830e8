"""Ranges of versions: `^1.2`, `~1.2.3`, `1.x`, `>=1.2 <2`, `1.2.3`, `*`.

Every range is one interval, which includes its lower end and excludes its upper end. So a database can search
it with two comparisons on an index.

| written | means |
|---|---|
| `1.2.3` | exactly that version |
| `^1.2.3` | from 1.2.3 up to the next change of the leftmost part that is not zero |
| `~1.2.3` | from 1.2.3 up to the next minor version; `~1` up to the next major |
| `1`, `1.x`, `1.2.*` | everything with these leading parts |
| `>=`, `>`, `<=`, `<`, `=` | a bound; several are separated by spaces or commas, and all must be met |
| `*` | every version |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce

from tensorforge.errors import InvalidInputError
from tensorforge.registry.domain.versions import MAX_PART, ModelVersion

Parts = tuple[int, int, int]

_LOWEST: Parts = (0, 0, 0)
_NUMBER = r"(?:0|[1-9][0-9]{0,9})"
_TERM = re.compile(
    rf"(?P<op>\^|~|>=|<=|>|<|=)?\s*(?P<major>{_NUMBER}|[xX*])"
    rf"(?:\.(?P<minor>{_NUMBER}|[xX*]))?(?:\.(?P<patch>{_NUMBER}|[xX*]))?"
)
_SEPARATOR = re.compile(r"\s*,\s*|\s+")
_MAX_LENGTH = 200


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The versions `v` with `low <= v < high`; `high` is `None` if there is no upper end.

    The ends are plain numbers, since `high` may be larger than the largest version.
    """

    low: Parts
    high: Parts | None

    def __contains__(self, version: ModelVersion) -> bool:
        return self.low <= version.parts and (self.high is None or version.parts < self.high)

    def intersect(self, other: VersionRange) -> VersionRange:
        """The range of versions that are in both ranges."""
        highs = [high for high in (self.high, other.high) if high is not None]
        return VersionRange(max(self.low, other.low), min(highs) if highs else None)

    @property
    def is_empty(self) -> bool:
        """Whether no version is in the range."""
        return self.high is not None and self.high <= self.low


def parse_range(text: str) -> VersionRange:
    """The range that a text describes; `InvalidInputError` shows the part that cannot be parsed."""
    if not isinstance(text, str) or len(text) > _MAX_LENGTH:
        raise InvalidInputError("a version range must be a text of at most 200 characters")
    joined = re.sub(r"(\^|~|>=|<=|>|<|=)\s+", r"\1", text.strip())
    terms = [_term(term, text) for term in _SEPARATOR.split(joined)]
    return reduce(VersionRange.intersect, terms)


def is_range(text: str) -> bool:
    """Whether `parse_range` accepts the text."""
    try:
        parse_range(text)
    except InvalidInputError:
        return False
    return True


def _term(term: str, whole: str) -> VersionRange:
    match = _TERM.fullmatch(term)
    if match is None:
        raise InvalidInputError(
            f"{term[:40]!r} in {whole[:60]!r} is no version range; "
            "write 1.2.3, ^1.2, ~1.2.3, 1.x, >=1.2 <2 or *"
        )
    given = _given(match, whole)
    low: Parts = (*given, *(0,) * (3 - len(given)))  # type: ignore[assignment]  # padded to three
    return _interval(match["op"] or "", given, low)


def _given(match: re.Match[str], whole: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in (match["major"], match["minor"], match["patch"]):
        if part is None or part in "xX*":
            break
        if int(part) > MAX_PART:
            raise InvalidInputError(f"{part} in {whole[:60]!r} is larger than {MAX_PART}")
        numbers.append(int(part))
    return tuple(numbers)


def _interval(op: str, given: tuple[int, ...], low: Parts) -> VersionRange:
    if not given:
        # No version is above or below every version, so `>*` and `<*` are empty.
        return VersionRange(_LOWEST, _LOWEST if op in (">", "<") else None)
    after = _after(given, len(given) - 1)
    match op:
        case ">=":
            return VersionRange(low, None)
        case ">":
            return VersionRange(after, None)
        case "<":
            return VersionRange(_LOWEST, low)
        case "<=":
            return VersionRange(_LOWEST, after)
        case "^":
            return VersionRange(low, _after(given, _leftmost_change(given)))
        case "~":
            return VersionRange(low, _after(given, min(1, len(given) - 1)))
    return VersionRange(low, after)


def _leftmost_change(given: tuple[int, ...]) -> int:
    for place, number in enumerate(given):
        if number:
            return place
    return len(given) - 1


def _after(given: tuple[int, ...], place: int) -> Parts:
    """The smallest version above all versions that have the same parts as `given` up to index `place`."""
    parts = [*given[:place], given[place] + 1, 0, 0][:3]
    return (parts[0], parts[1], parts[2])
