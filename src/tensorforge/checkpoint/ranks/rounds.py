"""Rounds: every rank sends a report to rank 0, rank 0 decides, and every rank receives the decision.

If a report is a failure, or does not arrive in time, the decision is that failure on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from tensorforge.checkpoint.faults import classify
from tensorforge.checkpoint.parallel import Deadline
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.errors import CheckpointError, CheckpointErrorType, EncodingError
from tensorforge.typed_json import decode_typed

Report = TypeVar("Report")
Decision = TypeVar("Decision")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one rank, as a message to the others."""

    message: str
    type: CheckpointErrorType
    path: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    failure: Failure | None = None
    content: msgspec.Raw = msgspec.Raw(b"null")


class RankTimeoutError(CheckpointError):
    """A rank did not report in time. It may have ended, or it may still be writing files."""


def failure_of(error: BaseException, otherwise: CheckpointErrorType) -> Failure:
    """An error as a report to rank 0."""
    path = error.checkpoint_path if isinstance(error, CheckpointError) else ""
    return Failure(message=str(error), type=classify(error, otherwise), path=path)


class Round(Generic[Report, Decision]):
    """One round with a type of report and a type of decision."""

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
        deadline: Deadline,
    ) -> Decision:
        """Report, and return the decision of rank 0; a failure of any rank is a `CheckpointError` on all."""
        envelope = self._pack(mine)
        if self._coordinator.rank:
            self._coordinator.gather(envelope, deadline.remaining)
            answer = self._coordinator.broadcast(None, deadline.remaining)
        else:
            answer = self._decide(envelope, decide, deadline)
        decision: Decision = self._open(answer, self._decision)
        return decision

    def _decide(
        self, envelope: bytes, decide: Callable[[list[Report]], Decision], deadline: Deadline
    ) -> bytes:
        try:
            received = self._coordinator.gather(envelope, deadline.remaining) or [envelope]
        except Exception as error:
            # Send the failure, so that the other ranks need not wait until their own deadlines.
            answer = self._pack(failure_of(error, self._otherwise))
            with contextlib.suppress(Exception):
                self._coordinator.broadcast(answer, deadline.remaining)
            raise RankTimeoutError(str(error), type=classify(error, self._otherwise)) from error
        try:
            reports = [
                self._open(packed, self._report, rank) for rank, packed in enumerate(received)
            ]
            answer = self._pack(decide(reports))
        except Exception as error:  # noqa: BLE001  raised on every rank, this one included
            answer = self._pack(failure_of(error, self._otherwise))
        return self._coordinator.broadcast(answer, deadline.remaining)

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
            raise EncodingError(f"a message between ranks cannot be decoded: {error}") from error
        failure = envelope.failure
        named = self._coordinator.world_size > 1 and rank >= 0
        message = f"rank {rank}: {failure.message}" if named else failure.message
        raise CheckpointError(message, failure.path, failure.type)
