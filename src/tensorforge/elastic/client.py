"""The client of a coordinator, for operators and launchers: status, watch, scale, remove, stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import grpc
import msgspec

from tensorforge.elastic.protocol import commands
from tensorforge.elastic.protocol.access import TlsOptions, call_metadata, open_channel
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.messages import decode
from tensorforge.elastic.protocol.reasons import Requester
from tensorforge.elastic.protocol.status_codes import translate


class CoordinatorClient:
    """A connection to one coordinator. Every call takes at most `timeout` seconds."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: TlsOptions | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._address = address
        self._metadata = call_metadata(token)
        self._timeout = timeout
        self._channel = open_channel(address, tls, [("grpc.max_receive_message_length", -1)])

    def status(self) -> ClusterView:
        """The cluster at this moment."""
        return self._unary("Status", b"")

    def watch(self) -> Iterator[ClusterView]:
        """The cluster now and after every change, until the connection breaks."""
        method = self._channel.unary_stream(f"/{commands.SERVICE}/Watch")
        call = method(b"", metadata=self._metadata)
        try:
            for data in call:
                yield _view(data)
        except grpc.RpcError as error:
            raise translate(error, self._address) from error
        finally:
            call.cancel()

    def scale(
        self,
        workers: int,
        by: str = "",
        *,
        expected: int | None = None,
        requester: Requester = Requester.OPERATOR,
    ) -> ClusterView:
        """Ask for this many workers.

        With `expected`, the `target_version` of the view that the number was computed from, the request is
        refused with a `ConflictError` if the target was set again since. Only a launcher names itself as the
        `requester`, so that it can tell its own numbers from those of others.
        """
        return self._control(commands.Scale(workers, by, expected, requester))

    def remove(self, worker_id: str, by: str = "") -> ClusterView:
        """Let a worker leave after its step."""
        return self._control(commands.Remove(worker_id, by))

    def stop(self, reason: str, by: str = "") -> ClusterView:
        """End the run; the workers are asked to save an emergency checkpoint."""
        return self._control(commands.Stop(reason, by))

    def report_exit(self, worker_id: str, reason: str, pid: int | None = None) -> ClusterView:
        """Report that a worker's process ended."""
        return self._control(commands.ReportExit(worker_id, reason, pid))

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _control(self, command: commands.Command) -> ClusterView:
        return self._unary("Control", msgspec.json.encode(command))

    def _unary(self, name: str, request: bytes) -> ClusterView:
        method = self._channel.unary_unary(f"/{commands.SERVICE}/{name}")
        try:
            return _view(method(request, metadata=self._metadata, timeout=self._timeout))
        except grpc.RpcError as error:
            raise translate(error, self._address) from error


# Made once, at import: two threads that are the first to decode a type together crash msgspec 0.22.
_decoder: msgspec.json.Decoder[ClusterView] = msgspec.json.Decoder(ClusterView)


def _view(data: bytes) -> ClusterView:
    return decode(_decoder, data, "a view of a cluster")
