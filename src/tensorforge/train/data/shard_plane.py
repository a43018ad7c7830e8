"""Moves shards to the workers that the plan gives them to, while training goes on.

new generation ──▶ members say what they store ──▶ the same plan on all ──▶ fetch in the background
                                                                              │
      training goes on: a member that stores a shard computes it    ◀─────────┤
                                                                              ▼
      a step's vote says what arrived ──▶ the owner computes it ──▶ the old holder deletes it
"""

from __future__ import annotations

import json
import logging
import ssl
from dataclasses import dataclass

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data.plan.intervals import IntervalSet
from tensorforge.data.plan.plan import DataRedistributionPlan, DataTransfer
from tensorforge.data.plan.redistributor import DataRedistributor
from tensorforge.data.plan.shards import DataShard, partition
from tensorforge.data.transfer.shard_server import ShardServer
from tensorforge.data.transfer.transfer_manager import DataTransferManager, TransferJob
from tensorforge.errors import TensorForgeError
from tensorforge.train.data.local_shards import LocalShards
from tensorforge.train.data.placement import Placement, single_holders
from tensorforge.train.group.generation_group import GenerationGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAccess:
    """How workers reach each other's shards. Both of `server_tls` and `client_tls` are set, or neither."""

    host: str = "127.0.0.1"
    token: str | None = None
    server_tls: ssl.SSLContext | None = None
    client_tls: ssl.SSLContext | None = None


class ShardPlane:
    """The shards of `data` on this worker: serves, fetches and deletes them. Used by the training thread."""

    def __init__(self, data: LocalShards, shards: int) -> None:
        self._data = data
        self._shards: tuple[DataShard, ...] = tuple(partition(len(data), shards))
        self._access = DataAccess()
        self._server: ShardServer | None = None
        self._manager: DataTransferManager | None = None
        self._job: TransferJob | None = None
        self._rank = 0
        self._released: set[int] | None = None
        self.placement: Placement | None = None
        data.open()

    def serve(self, access: DataAccess) -> int:
        """Begin to serve the stored shards to the other workers; return the port."""
        self._access = access
        self._server = ShardServer(
            self._data.open(), host=access.host, token=access.token, tls=access.server_tls
        )
        return self._server.address[1]

    def _stored(self) -> set[int]:
        """The numbers of the shards that are stored here completely."""
        here = self._data.open().held
        return {
            shard.shard_id
            for shard in self._shards
            if shard.size and here.covers(shard.start_index, shard.end_index)
        }

    def follow(
        self,
        group: GenerationGroup | None,
        topology: ClusterTopology,
        worker: WorkerId,
        config: ElasticTrainingConfig,
    ) -> DataRedistributionPlan:
        """Exchange with the members of a new generation what each stores, plan, and begin to fetch."""
        if self._server is not None:
            self._server.advance(topology.epoch)
        stored = self._exchange_stored(group)
        assigned = single_holders(len(self._shards), stored)
        plan = DataRedistributor(config).calculate_shard_plan(
            ClusterTopology(),
            topology,
            self._shards,
            ownership=dict(zip(topology.workers, assigned, strict=True)),
        )
        owners = [0] * len(self._shards)
        for rank, each in enumerate(topology.workers):
            for shard in plan.worker_assignments[each]:
                owners[shard.shard_id] = rank
        self._rank, self._released = topology.rank_of(worker), None
        self.placement = Placement(owners, stored)
        self._fetch(plan, worker, config)
        return plan

    def _exchange_stored(self, group: GenerationGroup | None) -> list[set[int]]:
        stored = self._stored()
        if group is None:
            return [stored]
        answers = group.gather_bytes(json.dumps(sorted(stored)).encode())
        return [set(json.loads(answer)) for answer in answers]

    def _fetch(
        self, plan: DataRedistributionPlan, worker: WorkerId, config: ElasticTrainingConfig
    ) -> None:
        store = self._data.open()
        if self._manager is None:
            self._manager = DataTransferManager(
                self._data.max_concurrent_transfers,
                worker=worker,
                store=store,
                origin=self._data.origin,
                generation=plan.generation,
                token=self._access.token,
                tls=self._access.client_tls,
                config=config,
            )
            self._data.damaged = self._refetch
        self._job = self._manager.start(plan)
        moving = [(m.shard.start_index, m.shard.end_index) for m in plan.transfers_to(worker)]
        store.clear_incoming(keep=moving)

    def _refetch(self, index: int) -> None:
        """Fetch the shard of a damaged sample again, from the origin."""
        shard = next(s for s in self._shards if s.start_index <= index < s.end_index)
        if self._manager is not None:
            move = DataTransfer(
                source_worker=None, destination_worker=self._manager.worker, shard=shard
            )
            self._manager.launch([move])

    def arrivals(self) -> list[int]:
        """For this worker's vote: for each shard, 1 if it has arrived and can now be computed here."""
        if self.placement is None or self.placement.is_settled:
            return [0] * len(self._shards)
        self._log_transfers()
        return self.placement.arrivals(self._rank, self._stored())

    def follow_arrivals(self, arrived: list[int]) -> None:
        """Let the owners compute the shards that arrived, and delete the shards that are not needed here."""
        if self.placement is None:
            return
        self.placement.follow_arrivals(arrived)
        needed = self.placement.needed_by(self._rank)
        if needed != self._released:
            self._released = needed
            kept = [self._shards[n] for n in needed]
            self._data.open().release(
                IntervalSet.of((shard.start_index, shard.end_index) for shard in kept)
            )

    def _log_transfers(self) -> None:
        """Log the outcome once all transfers have ended. A shard that could not be fetched stays where it was,
        or is read from the origin."""
        job = self._job
        if job is None or not all(future.done() for future in job.futures.values()):
            return
        self._job = None
        try:
            report = job.wait()
        except TensorForgeError as error:
            log.warning("shards could not be fetched, training goes on without them: %s", error)
            return
        log.info(
            "%d shards arrived: %d bytes in %.2f s, %d from the origin",
            report.transfers,
            report.bytes_received,
            report.seconds,
            report.from_origin,
        )

    def close(self) -> None:
        """Stop fetching and serving. The stored shards stay on the disk."""
        self._data.damaged = None
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        if self._server is not None:
            self._server.close()
            self._server = None
        self._data.close()
