"""The gRPC server around the machine: it reads streams, writes the journal, sends messages. It never decides.

One task feeds the machine. It takes the waiting inputs, writes the resulting entries to the journal, and only
then carries out the other instructions. So everything that a worker is told is in the journal already.

The server pings every connection. gRPC's native threads answer on the other side, so a worker whose
interpreter is busy for minutes counts as alive, and a frozen process does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec

from tensorforge.elastic.coordinator.journal import Journal
from tensorforge.elastic.coordinator.journal_records import Decided
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.cluster_state import Phase
from tensorforge.elastic.coordinator.machine.instructions import (
    Close,
    Instruction,
    Note,
    Record,
    Send,
)
from tensorforge.elastic.coordinator.machine.machine import Machine
from tensorforge.elastic.coordinator.machine.state_view import cluster_view
from tensorforge.elastic.protocol import access, commands, messages
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.status_codes import code_of
from tensorforge.elastic.protocol.timeouts import Timeouts
from tensorforge.errors import (
    AuthenticationError,
    EncodingError,
    NotFoundError,
    PermissionDeniedError,
    TensorForgeError,
    UnavailableError,
)

log = logging.getLogger(__name__)

OUTBOX = 10_000
"""How many messages may wait for one stream; a worker that reads more slowly is disconnected."""
RATE, BURST = 200.0, 400.0
"""How many messages one stream may send per second on average, and at once. More are read later."""
HELLO_TIMEOUT = 10.0
_GRACE = 2.0
_RETRY = 0.2
_WATCH_INTERVAL = 0.1


@dataclass(slots=True)
class _Stream:
    id: int
    peer: str
    outbox: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(OUTBOX))
    is_closing: bool = False
    said_hello: bool = False
    allowance: float = BURST
    refilled_at: float = 0.0

    def close(self) -> None:
        if not self.is_closing:
            self.is_closing = True
            with contextlib.suppress(asyncio.QueueFull):
                self.outbox.put_nowait(None)

    def wait_before_next(self, now: float) -> float:
        """Seconds to wait before the next message is read, so that the stream stays within its rate."""
        refill = (now - self.refilled_at) * RATE
        self.allowance = min(BURST, self.allowance + refill) - 1
        self.refilled_at = now
        return max(0.0, -self.allowance / RATE)


class ControlServer:
    """Runs a machine on an event loop and serves it over gRPC. Call its methods on that loop only."""

    def __init__(
        self,
        machine: Machine,
        journal: Journal,
        authorizer: access.Authorizer,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_note: Callable[[Note], None] | None = None,
    ) -> None:
        self._machine = machine
        self._journal = journal
        self._authorizer = authorizer
        self._clock = clock
        self._on_note = on_note
        self._streams: dict[int, _Stream] = {}
        self._ids = itertools.count(1)
        self._queue: asyncio.Queue[tuple[inputs.Input, asyncio.Future[None] | None]] = (
            asyncio.Queue()
        )
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._server: Any = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.heartbeats = 0
        self.decided_at = clock()

    async def start(self, host: str, port: int, tls: access.TlsOptions | None) -> int:
        """Serve on this address; returns the port."""
        self._server = grpc.aio.server(options=_server_options(self._machine.state.timeouts))
        self._server.add_generic_rpc_handlers((self._handlers(),))
        address = f"{host}:{port}"
        try:
            if tls is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, tls.server_credentials())
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {address}: is it in use?") from error
        await self._server.start()
        jobs = (self._decide(), self._renew(), self._report_alive())
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        self._submit(inputs.Tick())
        return int(bound)

    async def stop(self) -> None:
        """Close the streams, stop serving and release the lease."""
        for stream in list(self._streams.values()):
            stream.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(_GRACE)
        try:
            await asyncio.to_thread(self._journal.release)
        except Exception as error:  # noqa: BLE001  the error that led here must not be replaced
            log.warning("the lease could not be released, it ends by itself: %s", str(error))

    def view(self, history: int = 20) -> ClusterView:
        """The cluster at this moment."""
        state, run_id = self._machine.state, self._journal.run_id
        return cluster_view(state, self._clock(), run_id, history=history)

    async def perform(self, event: inputs.Input) -> None:
        """Give an input to the machine; returns once its results are in the journal and sent."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((event, done))
        await done

    @property
    def streams(self) -> int:
        """How many workers are connected."""
        return len(self._streams)

    # Running the machine

    def _submit(self, event: inputs.Input) -> None:
        self._queue.put_nowait((event, None))

    async def _decide(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await self._handle_batch(batch)
            self.decided_at = self._clock()

    async def _handle_batch(
        self, batch: list[tuple[inputs.Input, asyncio.Future[None] | None]]
    ) -> None:
        instructions: list[Instruction] = []
        waiting = []
        for event, done in batch:
            try:
                instructions += self._machine.handle(event, self._clock())
            except TensorForgeError as error:
                if done is None:
                    raise
                done.set_exception(error)
            else:
                waiting.append(done)
        await self._carry_out(instructions)
        for done in waiting:
            if done is not None and not done.done():
                done.set_result(None)
        self._set_timer()
        await self._compact_if_due()

    async def _compact_if_due(self) -> None:
        # All messages are sent by now, so no worker waits for the compaction.
        if self._journal.is_compaction_due:
            try:
                await asyncio.to_thread(self._journal.compact)
            except UnavailableError as error:
                log.warning("the journal could not be compacted: %s", str(error))

    async def _carry_out(self, instructions: list[Instruction]) -> None:
        entries = [i.entry for i in instructions if isinstance(i, Record)]
        if entries:
            await self._persist(entries)
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(instruction)
            elif isinstance(instruction, Close):
                self._close(instruction.connection)
            elif isinstance(instruction, Note):
                self._note(instruction)
        for entry in entries:
            if isinstance(entry, Decided):
                self._machine.handle(inputs.Announced(entry.generation), self._clock())
        if any(not isinstance(i, Send) for i in instructions):
            self._changed.set()
        if self._machine.state.phase is Phase.ENDED and not self.over.done():
            self.over.set_result(None)

    async def _persist(self, entries: list[Any]) -> None:
        while True:
            try:
                await asyncio.to_thread(self._journal.append, entries)
                return
            except UnavailableError as error:
                log.warning("the journal is unavailable, so nothing can be decided: %s", str(error))
                await asyncio.sleep(_RETRY)

    def _send(self, instruction: Send) -> None:
        data = messages.to_bytes(instruction.message)
        for connection in instruction.connections:
            stream = self._streams.get(connection)
            if stream is None or stream.is_closing:
                continue
            try:
                stream.outbox.put_nowait(data)
            except asyncio.QueueFull:
                log.warning("%s does not read its messages; its stream is closed", stream.peer)
                stream.close()

    def _close(self, connection: int) -> None:
        stream = self._streams.get(connection)
        if stream is not None:
            stream.close()

    def _note(self, note: Note) -> None:
        log.log(logging.getLevelNamesMapping()[note.level.upper()], "%s", note.text)
        if self._on_note is not None:
            self._on_note(note)

    def _set_timer(self) -> None:
        deadline = self._machine.next_deadline()
        if deadline == self._timer_at:
            return  # The usual case: a heartbeat changes no deadline.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self._submit(inputs.Tick())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._journal.lease_seconds / 3)
            try:
                await asyncio.to_thread(self._journal.renew)
            except UnavailableError as error:
                log.warning("the lease could not be renewed: %s", str(error))

    async def _report_alive(self) -> None:
        # gRPC closes a stream whose pings are not answered. So an open stream is a sign of life, even when
        # the worker's interpreter is too busy to send a heartbeat.
        while True:
            await asyncio.sleep(self._machine.state.timeouts.heartbeat)
            alive = tuple(s.id for s in self._streams.values() if not s.is_closing)
            self._submit(inputs.Alive(alive))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Step down if a task of this server ended by an error: without it the server only seems to lead."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        # As text: a log record with the error would keep this server, and so gRPC's threads, alive.
        is_expected = isinstance(error, TensorForgeError)
        text = str(error) if is_expected else "".join(traceback.format_exception(error))
        log.error("this coordinator stops: %s", text)
        for stream in list(self._streams.values()):
            stream.close()
        if not self.over.done():
            self.over.set_exception(error)

    # Serving

    def _handlers(self) -> Any:
        return grpc.method_handlers_generic_handler(
            commands.SERVICE,
            {
                "Join": grpc.stream_stream_rpc_method_handler(self._join),
                "Status": grpc.unary_unary_rpc_method_handler(self._status),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
                "Control": grpc.unary_unary_rpc_method_handler(self._control),
            },
        )

    async def _admit(self, context: Any, role: str) -> None:
        try:
            self._authorizer.authorize(context.invocation_metadata() or (), role)
        except (AuthenticationError, PermissionDeniedError) as error:
            log.warning("refused %s: %s", context.peer(), str(error))
            await context.abort(code_of(error), str(error))

    async def _join(self, _requests: Any, context: Any) -> None:
        await self._admit(context, access.JOIN)
        stream = _Stream(next(self._ids), context.peer(), refilled_at=self._clock())
        self._streams[stream.id] = stream
        reader = asyncio.create_task(self._read(stream, context))
        try:
            while (data := await stream.outbox.get()) is not None:
                await context.write(data)
        finally:
            reader.cancel()
            self._forget(stream, "its stream broke")

    async def _read(self, stream: _Stream, context: Any) -> None:
        reason = "its stream broke"
        try:
            data = await asyncio.wait_for(context.read(), HELLO_TIMEOUT)
            while data is not grpc.aio.EOF and not stream.is_closing:
                self._receive(stream, data)
                pause = stream.wait_before_next(self._clock())
                if pause:
                    await asyncio.sleep(pause)
                data = await context.read()
        except TimeoutError:
            reason = f"it did not say hello within {HELLO_TIMEOUT:.0f} s"
        except EncodingError as error:
            reason = str(error)
            log.warning("refused %s: %s", stream.peer, str(error))
            refused = messages.Refused(code=messages.REFUSED_INVALID, reason=reason)
            self._send(Send((stream.id,), refused))
        except (grpc.aio.UsageError, asyncio.InvalidStateError, grpc.RpcError):
            reason = "its stream broke"
        finally:
            # Also after an error that nobody expected: a stream without a reader is not alive.
            self._forget(stream, reason)
            stream.close()

    def _receive(self, stream: _Stream, data: bytes) -> None:
        message = messages.from_worker(data)
        if isinstance(message, messages.Hello) == stream.said_hello:
            raise EncodingError("a stream begins with one hello, and there is no second one")
        stream.said_hello = True
        if isinstance(message, messages.Heartbeat):
            self.heartbeats += 1
        self._submit(inputs.Received(stream.id, message))

    def _forget(self, stream: _Stream, reason: str) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._submit(inputs.Closed(stream.id, reason, self._clock()))

    async def _status(self, _request: bytes, context: Any) -> bytes:
        await self._admit(context, access.OBSERVE)
        return msgspec.json.encode(self.view())

    async def _watch(self, _request: bytes, context: Any) -> AsyncIterator[bytes]:
        await self._admit(context, access.OBSERVE)
        while True:
            self._changed.clear()
            yield msgspec.json.encode(self.view())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)
            await asyncio.sleep(_WATCH_INTERVAL)

    async def _control(self, request: bytes, context: Any) -> bytes:
        await self._admit(context, access.CONTROL)
        try:
            command = commands.from_bytes(request, context.peer())
            if isinstance(command, commands.Remove):
                self._require_worker(command.worker_id)
            await self.perform(command)
        except TensorForgeError as error:
            await context.abort(code_of(error), str(error))
        return msgspec.json.encode(self.view())

    def _require_worker(self, worker_id: str) -> None:
        if self._machine.state.roster.get(worker_id) is None:
            known = ", ".join(sorted(p.id for p in self._machine.state.roster)) or "nobody"
            raise NotFoundError(f"there is no worker {worker_id!r}; known workers: {known}")


def _server_options(timeouts: Timeouts) -> list[tuple[str, int]]:
    return [
        *timeouts.ping_options(),
        ("grpc.keepalive_permit_without_calls", 1),
        # Workers ping the coordinator as often, and must not be cut off for it.
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", messages.MAX_UPLOAD_BYTES),
        ("grpc.so_reuseport", 0),
    ]
