"""The terms of a run: the named facts that must be the same on all its workers, and how two of them differ."""

from __future__ import annotations

from collections.abc import Mapping

_NAMED = 10
"""How many differences a text names; the rest are counted."""


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Each fact in which a worker (`theirs`) differs from the run (`ours`); empty if none does."""
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    parts = [
        f"{name}: {theirs.get(name, 'not given')} here, {ours.get(name, 'not given')} in the run"
        for name in names[:_NAMED]
    ]
    if len(names) > _NAMED:
        parts.append(f"{len(names) - _NAMED} more")
    return "; ".join(parts)
