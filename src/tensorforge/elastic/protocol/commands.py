"""What an operator may ask of a running coordinator."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.protocol.messages import Name, Text
from tensorforge.errors import EncodingError

SERVICE = "tensorforge.Coordinator"
"""The gRPC service; its methods are Join, Status, Watch and Control."""


class Scale(msgspec.Struct, frozen=True, tag="scale", forbid_unknown_fields=True):
    """Have this many workers; with `expected`, only if nobody has set a number since that version of it."""

    workers: int
    by: Text = ""
    expected: int | None = None

    def as_input(self, peer: str) -> inputs.Input:
        """The event for the machine."""
        return inputs.ScaleRequested(self.workers, self.by or peer, self.expected)


class Remove(msgspec.Struct, frozen=True, tag="remove", forbid_unknown_fields=True):
    """Let this worker leave gracefully."""

    worker_id: Name
    by: Text = ""

    def as_input(self, peer: str) -> inputs.Input:
        """The event for the machine."""
        return inputs.RemovalRequested(self.worker_id, self.by or peer)


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """End the run, with an emergency checkpoint."""

    reason: Text
    by: Text = ""

    def as_input(self, peer: str) -> inputs.Input:
        """The event for the machine."""
        return inputs.StopRequested(self.reason, self.by or peer)


class ReportExit(msgspec.Struct, frozen=True, tag="exit", forbid_unknown_fields=True):
    """A launcher saw this worker's process end."""

    worker_id: Name
    reason: Text
    pid: int | None = None

    def as_input(self, peer: str) -> inputs.Input:  # noqa: ARG002  one signature for all commands
        """The event for the machine."""
        return inputs.Exited(self.worker_id, self.reason, self.pid)


Command: TypeAlias = Scale | Remove | Stop | ReportExit

_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def from_bytes(data: bytes) -> Command:
    """Decode a command; anything else is an `EncodingError`."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise EncodingError(f"not a command: {error}") from error
