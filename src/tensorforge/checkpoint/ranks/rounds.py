"""How ranks decide together: everybody reports, rank 0 decides, everybody learns the decision.

A report may be a failure. Then, or if somebody does not report in time, the decision is a failure too,
the same on every rank: nobody goes on alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from tensorforge.checkpoint.faults import classify
from tensorforge.checkpoint.parallel import Guard
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.errors import CheckpointError, CheckpointErrorType, EncodingError
from tensorforge.typed_json import decode_typed

Report = TypeVar("Report")
Decision = TypeVar("Decision")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank cannot go on."""

    message: str
    type: CheckpointErrorType
    path: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    failure: Failure | None = None
    content: msgspec.Raw = msgspec.Raw(b"null")


class SilentRankError(CheckpointError):
    """A rank did not report in time: it may be dead, and it may still be writing."""


def failure_of(error: BaseException, otherwise: CheckpointErrorType) -> Failure:
    """An error as a report to the others."""
    path = error.checkpoint_path if isinstance(error, CheckpointError) else ""
    return Failure(message=str(error), type=classify(error, otherwise), path=path)


class Round(Generic[Report, Decision]):
    """One report and one decision."""

    def __init__(
        self,
        coordinator: DistributedCoordinator,
        report: type[Report],
        decision: type[Decision],
        otherwise: CheckpointErrorType,
    ) -> None:
        self._coordinator = coordinator
        self._report = report
        self._decision = decision
        self._otherwise = otherwise

    def agree(
        self,
        mine: Report | Failure,
        decide: Callable[[list[Report]], Decision],
        guard: Guard,
    ) -> Decision:
        """Report, and return what rank 0 decided; a failure anywhere is a `CheckpointError` everywhere."""
        envelope = self._pack(mine)
        if self._coordinator.rank:
            self._coordinator.gather(envelope, guard.remaining)
            answer = self._coordinator.broadcast(None, guard.remaining)
        else:
            answer = self._lead(envelope, decide, guard)
        decision: Decision = self._open(answer, self._decision)
        return decision

    def _lead(
        self, envelope: bytes, decide: Callable[[list[Report]], Decision], guard: Guard
    ) -> bytes:
        try:
            received = self._coordinator.gather(envelope, guard.remaining) or [envelope]
        except Exception as error:
            # Those who are waiting for the decision should not have to wait for their own deadlines.
            answer = self._pack(failure_of(error, self._otherwise))
            with contextlib.suppress(Exception):
                self._coordinator.broadcast(answer, guard.remaining)
            raise SilentRankError(str(error), type=classify(error, self._otherwise)) from error
        try:
            reports = [
                self._open(packed, self._report, rank) for rank, packed in enumerate(received)
            ]
            answer = self._pack(decide(reports))
        except Exception as error:  # noqa: BLE001  it is raised on every rank, here too
            answer = self._pack(failure_of(error, self._otherwise))
        return self._coordinator.broadcast(answer, guard.remaining)

    def _pack(self, content: Report | Decision | Failure) -> bytes:
        if isinstance(content, Failure):
            return msgspec.json.encode(_Envelope(failure=content))
        return msgspec.json.encode(_Envelope(content=msgspec.Raw(msgspec.json.encode(content))))

    def _open(self, packed: bytes, kind: Any, rank: int = -1) -> Any:
        try:
            envelope = decode_typed(packed, _Envelope)
            if envelope.failure is None:
                return decode_typed(bytes(envelope.content), kind)
        except msgspec.DecodeError as error:
            raise EncodingError(f"a message between ranks makes no sense: {error}") from error
        failure = envelope.failure
        named = self._coordinator.world_size > 1 and rank >= 0
        message = f"rank {rank}: {failure.message}" if named else failure.message
        raise CheckpointError(message, failure.path, failure.type)
