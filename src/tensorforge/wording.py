"""Words for messages to people."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """The number with its noun in singular or plural: `1 worker`, `2 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
