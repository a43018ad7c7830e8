from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tensorforge.registry import ModelRegistry
from tensorforge.registry.service.application import build
from tensorforge.registry.service.limits import Limits
from tensorforge.registry.tokens import DatabaseTokens, Scope

EVERYTHING = [scope.value for scope in Scope]


@pytest.fixture
def served() -> Iterator[ModelRegistry]:
    with ModelRegistry() as registry:
        yield registry


@pytest.fixture
def token(served: ModelRegistry) -> str:
    return DatabaseTokens(served.database).issue("root", EVERYTHING)


@pytest.fixture
def client(served: ModelRegistry, token: str) -> Iterator[TestClient]:
    """The whole application, called in this process by somebody who may do everything."""
    app = build(served, limits=Limits(body_bytes=100_000), deliver_webhooks=False)
    with TestClient(app, headers={"Authorization": f"Bearer {token}"}) as opened:
        yield opened
