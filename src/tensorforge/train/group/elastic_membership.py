"""Membership in a cluster that is led by a coordinator."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.goal import Goal
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.protocol.access import TlsOptions
from tensorforge.elastic.worker.worker import ElasticWorker
from tensorforge.encoding import decode
from tensorforge.environment import CA, CERT, CONFIG, COORDINATOR, HOST, KEY, TOKEN, WORKER_ID
from tensorforge.errors import (
    ClosedError,
    ConfigurationError,
    StaleGenerationError,
    TrainingAbortedError,
)
from tensorforge.train.data.shard_plane import DataAccess
from tensorforge.train.group.membership import RunEnd, Start

_STORE = "store"
_FLUSH_SECONDS = 30.0


class ElasticMembership:
    """A worker of the cluster whose coordinator listens at `address`."""

    def __init__(self, address: str, worker: ElasticWorker) -> None:
        self._address = address
        self._worker = worker
        self._is_connected = False

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        serve: Callable[[DataAccess], int] | None = None,
    ) -> ElasticMembership:
        """The membership that a launcher describes in `TENSORFORGE_*` variables.

        `serve` begins to serve this worker's shards to the others and returns the port.
        """
        address = COORDINATOR.read(environment)
        if address is None:
            raise ConfigurationError(COORDINATOR.name, "", COORDINATOR.kind.rule)
        here = HOST.read(environment) or _address_towards(address)
        name = WORKER_ID.read(environment) or f"{socket.gethostname()}-{os.getpid()}"
        token, tls = TOKEN.read(environment), _tls(environment)
        payload = CONFIG.read(environment)
        config = None if payload is None else decode(payload, ElasticTrainingConfig)
        data_port = 0 if serve is None else serve(_data_access(here, token, tls))
        identity = WorkerId(name, here, data_port)
        # Training stops at every barrier by itself, so the worker never answers for it.
        worker = ElasticWorker(identity, config, token=token, tls=tls, answers_by_itself=False)
        return cls(address, worker)

    @property
    def worker_id(self) -> WorkerId:
        """This worker's name and address."""
        return self._worker.worker_id

    @property
    def config(self) -> ElasticTrainingConfig:
        """The run's configuration, as the coordinator sent it."""
        return self._worker.config

    def connect(
        self,
        rescaling_requested: Callable[[RescalingEvent], None],
        run_ended: Callable[[RunEnd], None],
        fenced: Callable[[str], None],
        *,
        terms: Mapping[str, str],
        goal: Goal,
    ) -> None:
        """Register with the coordinator."""
        self._worker.rescaling_requested.append(rescaling_requested)
        self._worker.run_ended.append(lambda reason: run_ended(self._end(reason)))
        self._worker.fenced.append(fenced)
        self._worker.agree_to(terms, goal)
        self._worker.connect_to_cluster(self._address)
        self._is_connected = True

    def _end(self, reason: str) -> RunEnd:
        try:
            self._worker.wait_for_rescale(0)
        except TrainingAbortedError as ended:
            facts = ended.facts
            outcome = str(facts.get("outcome", "aborted"))
            return RunEnd(outcome, ended.reason, emergency=bool(facts.get("emergency")))
        return RunEnd("aborted", reason)

    def ready(
        self, generation: int, committed_step: int, prepared_step: int | None, store: str | None
    ) -> None:
        """Answer the first half of the rescale barrier."""
        self._worker.ready(
            generation,
            committed_step=committed_step,
            prepared_step=prepared_step,
            attributes={} if store is None else {_STORE: store},
        )

    def wait_for_start(self, generation: int, timeout: float) -> Start | None:
        """Wait for the formation notice, which has rank 0's store and the coordinator's verdict."""
        try:
            formation = self._worker.wait_for_formation(timeout)
        except (StaleGenerationError, TrainingAbortedError, ClosedError):
            return None
        if formation is None or formation.generation != generation:
            return None
        first = formation.topology.workers[0]
        store = formation.members[first.id].attributes.get(_STORE, "")
        return Start(store, formation.verdict)

    def formed(self, generation: int, moved: Mapping[str, int]) -> None:
        """Answer the second half of the rescale barrier."""
        self._worker.formed(generation, {what: count for what, count in moved.items() if count})

    def report(self, step: CommittedStep) -> None:
        """Send the committed step with the next heartbeat."""
        self._worker.report_progress(
            step.generation,
            step.epoch,
            step.step,
            step.learning_rate,
            step.samples,
            step.metrics,
            global_batch_size=step.samples,
        )

    def suspect(self, generation: int, reason: str) -> None:
        """Ask the coordinator to find out which member is gone."""
        self._worker.suspect(generation, None, reason)

    def leave(self, reason: str, *, together: bool) -> bool:
        """Ask the coordinator for a rescale without this worker."""
        self._worker.leave(reason, together=together, stops_if_last=True)
        return True

    @property
    def leave_refused(self) -> str | None:
        """Why the coordinator does not let this worker leave."""
        return self._worker.leave_refused

    def wait_for_release(self, timeout: float) -> bool:
        """Wait until the other workers have formed a generation without this one."""
        return self._worker.wait_for_release(timeout)

    def finish(self, reason: str, *, committed_step: int, epoch: int) -> None:
        """Report that training is over; the coordinator decides whether the goal is reached."""
        self._worker.finish(reason, committed_step=committed_step, epoch=epoch)

    def abort(self, reason: str, traceback: str) -> None:
        """Report what the training code raised; the coordinator decides whether the run ends."""
        self._worker.abort(reason, traceback)

    def close(self) -> None:
        """Send what is still to be sent, then disconnect."""
        if self._is_connected:
            self._is_connected = False
            self._worker.flush(_FLUSH_SECONDS)
        self._worker.disconnect()


def _tls(environment: Mapping[str, str] | None) -> TlsOptions | None:
    ca, certificate, key = (variable.read(environment) for variable in (CA, CERT, KEY))
    if ca is None and certificate is None and key is None:
        return None
    return TlsOptions(ca=ca, certificate=certificate, key=key)


def _data_access(host: str, token: str | None, tls: TlsOptions | None) -> DataAccess:
    """With certificates of the job's authority, workers also demand certificates of each other."""
    if tls is None or tls.ca is None or tls.certificate is None:
        return DataAccess(host=host, token=token)
    return DataAccess(
        host=host,
        token=token,
        server_tls=_mutual(ssl.PROTOCOL_TLS_SERVER, tls),
        client_tls=_mutual(ssl.PROTOCOL_TLS_CLIENT, tls),
    )


def _mutual(side: Any, tls: TlsOptions) -> ssl.SSLContext:
    """Both sides must show a certificate of the same authority. Host names are not compared."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(str(tls.certificate), tls.key)
    except OSError as error:
        raise ConfigurationError(
            CERT.name, tls.certificate, f"cannot be loaded: {error}"
        ) from error
    return context


def _address_towards(address: str) -> str:
    """This machine's address on the route to `address`. Nothing is sent to find it."""
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
