"""What operators and launchers may ask of a running coordinator; its machine takes these as inputs."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorforge.elastic.protocol.messages import Name, Text, decode
from tensorforge.elastic.protocol.reasons import Requester

SERVICE = "tensorforge.Coordinator"
"""The gRPC service; its methods are Join, Status, Watch and Control."""


class Scale(msgspec.Struct, frozen=True, tag="scale", forbid_unknown_fields=True):
    """Have this many workers. `by` names the client in texts.

    With `expected`, the command is refused if the number was set again since it had that version.
    """

    workers: int
    by: Text = ""
    expected: int | None = None
    requester: Requester = Requester.OPERATOR


class Remove(msgspec.Struct, frozen=True, tag="remove", forbid_unknown_fields=True):
    """Let this worker leave after its step."""

    worker_id: Name
    by: Text = ""


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """End the run; its workers are asked to save an emergency checkpoint."""

    reason: Text
    by: Text = ""


class ReportExit(msgspec.Struct, frozen=True, tag="exit", forbid_unknown_fields=True):
    """A launcher saw this worker's process end. With `pid`, it counts only for the process of that id."""

    worker_id: Name
    reason: Text
    pid: int | None = None


Command: TypeAlias = Scale | Remove | Stop | ReportExit

_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def from_bytes(data: bytes, peer: str) -> Command:
    """Decode a command; anything else is an `EncodingError`. `peer` is the name of a client that gives none."""
    command = decode(_decoder, data, "a command")
    if isinstance(command, ReportExit) or command.by:
        return command
    return msgspec.structs.replace(command, by=peer)
