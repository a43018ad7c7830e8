"""`ServiceContext`: what all requests of one server process share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from starlette.requests import Request

from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.service.limits import FailedTokens, Limits, RateLimiter
from tensorforge.registry.service.operations import Call
from tensorforge.registry.service.service_metrics import Metrics
from tensorforge.registry.service.service_options import ServiceOptions
from tensorforge.registry.service.write_queue import WriteQueue
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.security import TokenRecord

Result = TypeVar("Result")

_THREADS = 16


class ServiceContext:
    """The registry, its callers' tokens and limits, the metrics, and the threads that serve the event loop."""

    def __init__(
        self,
        registry: ModelRegistry,
        *,
        limits: Limits | None = None,
        options: ServiceOptions | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.tokens = DatabaseTokens(registry.database)
        self.limits = limits or Limits()
        self.limiter = RateLimiter(self.limits.rate, self.limits.burst)
        self.failed_tokens = FailedTokens()
        self.options = options or ServiceOptions()
        self.monotonic = monotonic
        self.metrics = Metrics()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="registry")
        # SQLite allows one writer at a time, so one thread makes all changes. PostgreSQL needs no queue.
        database = registry.database
        self._write_queue = WriteQueue(database) if database.is_sqlite else None

    def close(self) -> None:
        """Finish the work that was begun, and end the threads."""
        if self._write_queue is not None:
            self._write_queue.close()
        self._threads.shutdown()

    async def run(
        self,
        work: Callable[..., Result],
        *arguments: Any,
        quick: bool = False,
        changes: bool = False,
    ) -> Result:
        """Run `work` and return its result.

        Work that `changes` the registry runs in the write queue if there is one; it is durable when this
        returns. `quick` work runs in the event loop if the database is SQLite: reading a row by its key waits
        for no lock and takes less time than passing it to a thread. All other work runs in a thread.
        """
        if quick and self.registry.database.is_sqlite:
            return work(*arguments)
        if changes and self._write_queue is not None:
            return cast("Result", await self._write_queue.run(work, *arguments))
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
        """The call of an operation by this request."""
        return Call(
            registry=self.registry,
            principal=principal,
            path=request.path_params,
            query=query,
            body=body,
            headers=request.headers,
            digest=digest,
            options=self.options,
        )
