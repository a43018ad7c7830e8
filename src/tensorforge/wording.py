"""Words that messages to people are made of."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`: the number with its noun, which takes an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
