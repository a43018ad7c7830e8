from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorforge.registry import ModelRegistry
from tensorforge.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registry(clock: ManualClock) -> Iterator[ModelRegistry]:
    """A registry in memory, whose clock only the test advances."""
    with ModelRegistry(clock=lambda: clock.utc) as opened:
        yield opened


@pytest.fixture
def stored(database_url: str, clock: ManualClock) -> Iterator[ModelRegistry]:
    """A registry on SQLite and on PostgreSQL."""
    with ModelRegistry(database_url, clock=lambda: clock.utc) as opened:
        yield opened
