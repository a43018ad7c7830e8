"""What all requests to one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from starlette.requests import Request

from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.limits import Limits, RateLimiter
from tensorforge.registry.service.operations import Call
from tensorforge.registry.service.service_metrics import Metrics
from tensorforge.registry.service.write_queue import Writer
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.security import TokenRecord

Result = TypeVar("Result")

_THREADS = 16


class Service:
    """The registry, who may use it and how much, and the threads that work for the event loop."""

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        limits: Limits | None = None,
        allow_private_webhooks: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.tokens = DatabaseTokens(registry.database)
        self.limits = limits or Limits()
        self.limiter = RateLimiter(self.limits.rate, self.limits.burst)
        self.allow_private_webhooks = allow_private_webhooks
        self.monotonic = monotonic
        self.metrics = Metrics()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="registry")
        # SQLite has one writer at a time, so ours makes all changes; PostgreSQL's do not wait in line.
        self._writer = Writer(registry.database) if registry.database.is_sqlite else None

    def close(self) -> None:
        """Let the threads finish what they have begun, and end them."""
        if self._writer is not None:
            self._writer.close()
        self._threads.shutdown()

    async def run(
        self,
        work: Callable[..., Result],
        *arguments: Any,
        quick: bool = False,
        changes: bool = False,
    ) -> Result:
        """Do some work beside the event loop, or within it where that cannot hold others up.

        A point read from SQLite waits for no lock and takes less time than handing it to a thread does. What
        changes something is durable when this returns.
        """
        if quick and self.registry.database.is_sqlite:
            return work(*arguments)
        if changes and self._writer is not None:
            return cast("Result", await self._writer.run(work, *arguments))
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def call(
        self,
        request: Request,
        principal: TokenRecord,
        *,
        query: Any = None,
        body: Any = None,
        digest: str = "",
    ) -> Call:
        """A request as the operations see it."""
        return Call(
            registry=self.registry,
            principal=principal,
            path=request.path_params,
            query=query,
            body=body,
            headers=request.headers,
            digest=digest,
            allow_private_webhooks=self.allow_private_webhooks,
        )
