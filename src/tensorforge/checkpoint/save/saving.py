"""The save protocol. Every step ends in a common decision, so that all ranks succeed or all fail.

1. Everybody describes what it holds. Rank 0 sweeps up after crashed saves, claims the prefix and plans.
2. Where one rank must write a tensor that lies on several, the others leave their parts in the store.
3. Everybody writes its files, durably, and reports their chunks.
4. Rank 0 checks that every tensor is complete and creates the manifest. From then on the checkpoint exists.

If anything fails before that, everybody removes what it wrote; what a dead rank left, the next save removes.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.faults import FaultToleranceHandler
from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.codecs import encoder_for
from tensorforge.checkpoint.format.file_layout import (
    MODEL,
    RANDOM,
    index_document,
    index_key,
    name_in_file,
)
from tensorforge.checkpoint.format.formats import CheckpointFormat, CompressionLevel
from tensorforge.checkpoint.format.manifest import (
    CHECKSUM,
    VERSION,
    CheckpointManifest,
    FileEntry,
    ShardData,
    TensorMetadata,
    check_manifest,
    checksum,
    merge_shards,
)
from tensorforge.checkpoint.format.state_trees import encode_tree, merge_trees
from tensorforge.checkpoint.load.chunks import StoredChunks
from tensorforge.checkpoint.load.tensor_reader import Destination, read_tensors
from tensorforge.checkpoint.model_state import Captured
from tensorforge.checkpoint.options import Progress, SaveOptions
from tensorforge.checkpoint.parallel import Guard
from tensorforge.checkpoint.progress import Meter
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.checkpoint.ranks.rounds import Failure, Round, SilentRankError, failure_of
from tensorforge.checkpoint.save.assignment import Holding, agreed_ties
from tensorforge.checkpoint.save.file_image import FileImage
from tensorforge.checkpoint.save.held import HeldMemory
from tensorforge.checkpoint.save.shard_writer import WORKERS, WrittenFile, write_file
from tensorforge.checkpoint.save.staging import StagingArea
from tensorforge.checkpoint.save.write_plan import RankPlan, plan_files
from tensorforge.errors import CheckpointErrorType, TensorForgeError
from tensorforge.storage.blobs import BlobStore

_SAVE_FAILED = CheckpointErrorType.SAVE_FAILED
_SWEEP_SECONDS = 600.0


class Description(msgspec.Struct, frozen=True):
    """What a rank holds: the boxes of tensors, which of them are one memory, everything else as trees."""

    holdings: list[Holding]
    trees: dict[str, Any]
    ties: dict[str, str]


class SavePlan(msgspec.Struct, frozen=True):
    """What rank 0 decided: the claim, each rank's files, and which tensors are other names of ones in them."""

    intent: store_index.Intent
    plans: list[RankPlan]
    ties: dict[str, str]


class Parts(msgspec.Struct, frozen=True):
    """The parts of tensors that ranks left for one another."""

    shards: list[ShardData]


class Committed(msgspec.Struct, frozen=True):
    """The checkpoint exists; `content` is a digest of its tensors."""

    prefix: str
    content: str


@dataclass(slots=True)
class Ticket:
    """A save between its plan and its commit."""

    intent: store_index.Intent
    plans: list[RankPlan]
    captured: Captured
    options: SaveOptions
    ties: dict[str, str]
    state: dict[str, Any] = field(default_factory=dict)
    images: list[FileImage] = field(default_factory=list)
    late: list[FileImage] = field(default_factory=list)
    part: FileImage | None = None
    is_open: bool = False
    failure: Failure | None = None
    memory: HeldMemory = field(init=False)
    scattered: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = HeldMemory(self.captured, self.ties)
        parts = (plan.part for plan in self.plans if plan.part is not None)
        self.scattered = frozenset(piece.name for part in parts for piece in part.pieces)


class Saver:
    """The save protocol for one rank."""

    def __init__(
        self,
        coordinator: DistributedCoordinator,
        store: BlobStore,
        faults: FaultToleranceHandler,
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._faults = faults
        self._next_sweep = 0.0

    def plan(
        self,
        capture: Callable[[], Captured],
        options: SaveOptions,
        guard: Guard,
    ) -> Ticket:
        """Step 1. The tensors are only looked at."""
        captured = Captured()
        mine: Description | Failure
        try:
            captured = capture()
            mine = Description(captured.holdings(), captured.trees, captured.ties)
        except Exception as error:  # noqa: BLE001  reported to the others, raised on every rank
            mine = failure_of(error, _SAVE_FAILED)
        state: dict[str, Any] = {}

        def decide(reports: list[Description]) -> SavePlan:
            state.update(merge_trees([report.trees for report in reports]))
            return self._decide(reports, options, guard)

        decision = self._round(Description, SavePlan).agree(mine, decide, guard)
        return Ticket(decision.intent, decision.plans, captured, options, decision.ties, state)

    def _decide(self, reports: list[Description], options: SaveOptions, guard: Guard) -> SavePlan:
        prefix = options.checkpoint_prefix or _prefix_from_time()
        everything = [report.holdings for report in reports]
        ties = agreed_ties(everything, [report.ties for report in reports])
        plans = plan_files(
            options.format,
            prefix,
            [[holding for holding in held if holding.name not in ties] for held in everything],
            compressed=options.compression_level is not CompressionLevel.NONE
            or options.increment is not None,
        )
        self._sweep_now_and_then()
        intent = store_index.announce(self._store, prefix, len(reports), guard.timeout)
        return SavePlan(intent, plans, ties)

    def _sweep_now_and_then(self) -> None:
        """At the first save, after one that failed, and every ten minutes: it lists the whole store."""
        if time.monotonic() >= self._next_sweep:
            store_index.sweep(self._store)
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS

    def _round(self, report: type[Any], decision: type[Any]) -> Round[Any, Any]:
        return Round(self._coordinator, report, decision, _SAVE_FAILED)

    def stage(self, ticket: Ticket, area: StagingArea, guard: Guard) -> None:
        """Copy everything that this rank will write; afterwards the state may change.

        A failure is kept for `write`, which must be called in any case: the others need to hear of it.
        """
        try:
            self._open_images(ticket, copied=True)
            parts = [ticket.part] if ticket.part else []
            area.stage([*ticket.images, *parts], guard, WORKERS)
        except Exception as error:  # noqa: BLE001  reported to the others, raised on every rank
            ticket.failure = failure_of(error, _SAVE_FAILED)

    def _open_images(self, ticket: Ticket, *, copied: bool = False) -> None:
        """Say where the bytes of this rank's files lie in memory.

        Nothing is copied, unless `copied`: then tensors that are still to be collected from others, and their
        neighbours in the file, are, because such a file cannot be staged as a whole.
        """
        plan = ticket.plans[self._coordinator.rank]
        memory = ticket.memory
        if plan.part is not None:
            ticket.part = memory.image(plan.part, headless=True)
        for file in plan.files:
            if any(piece.name in ticket.scattered for piece in file.pieces):
                ticket.late.append(memory.assembled(file, ticket.scattered, copied=copied))
            else:
                ticket.images.append(memory.image(file))
        ticket.is_open = True

    def write(self, ticket: Ticket, guard: Guard, progress: Progress | None) -> Committed:
        """Steps 2 to 4."""
        try:
            if ticket.scattered:
                parts = self._leave_parts(ticket, guard)
                mine = self._reported(
                    ticket, lambda: self._collect_and_write(ticket, parts, guard, progress)
                )
            else:
                mine = self._reported(ticket, lambda: self._write_all(ticket, guard, progress))
            commit = functools.partial(self._commit, ticket)
            committed: Committed = self._round(ShardData, Committed).agree(mine, commit, guard)
            return committed
        except BaseException as error:
            self._next_sweep = 0.0
            self._undo(ticket, everybody_stopped=not isinstance(error, SilentRankError))
            raise

    def _reported(self, ticket: Ticket, work: Callable[[], ShardData]) -> ShardData | Failure:
        """The result of some work, or why there is none: the others wait for one or the other."""
        if ticket.failure is not None:
            return ticket.failure
        try:
            if not ticket.is_open:
                self._open_images(ticket)
            return work()
        except Exception as error:  # noqa: BLE001  raised on every rank
            return failure_of(error, _SAVE_FAILED)

    def _collect_and_write(
        self, ticket: Ticket, parts: list[ShardData], guard: Guard, progress: Progress | None
    ) -> ShardData:
        self._collect_parts(ticket, parts, guard)
        return self._write_all(ticket, guard, progress)

    def _write_all(self, ticket: Ticket, guard: Guard, progress: Progress | None) -> ShardData:
        images = [*ticket.images, *ticket.late]
        meter = Meter(sum(image.plan.size for image in images), progress)
        return self._write_files(images, ticket.options, guard, meter)

    def _write_files(
        self, images: list[FileImage], options: SaveOptions, guard: Guard, meter: Meter
    ) -> ShardData:
        written = [self._write_one(image, options, guard, meter) for image in images]
        shards = [ShardData(0, file.files, file.tensors) for file in written]
        return ShardData(self._coordinator.rank, *merge_shards(shards))

    def _write_one(
        self,
        image: FileImage,
        options: SaveOptions,
        guard: Guard,
        meter: Meter,
    ) -> WrittenFile:
        codec = encoder_for(options.compression_level)

        def attempt() -> WrittenFile:
            # The prefix is claimed, so a file of that name can only be from an attempt of our own.
            self._store.delete(image.plan.key)
            return write_file(self._store, image, codec, guard, meter, options.increment)

        return self._faults.execute_with_retry(attempt)

    def _leave_parts(self, ticket: Ticket, guard: Guard) -> list[ShardData]:
        """Step 2: leave in the store what others have to put together, and learn what they left."""

        def leave() -> ShardData:
            images = [ticket.part] if ticket.part else []
            return self._write_files(images, SaveOptions(), guard, Meter(0, None))

        mine = self._reported(ticket, leave)
        parts: Parts = self._round(ShardData, Parts).agree(mine, Parts, guard)
        return parts.shards

    def _collect_parts(self, ticket: Ticket, parts: list[ShardData], guard: Guard) -> None:
        """Complete the tensors that this rank writes whole."""
        incomplete = ticket.memory.incomplete
        if not incomplete:
            return
        files, tensors = merge_shards(parts)
        destinations = [
            Destination(name, Box.whole(tuple(tensor.shape)), tensor)
            for name, tensor in incomplete.items()
            if name in tensors
        ]
        manifest = self._manifest(ticket, files, tensors)
        source = StoredChunks(self._store, manifest, self._faults.retry_policy)
        read_tensors(source, destinations, guard=guard)

    def _commit(self, ticket: Ticket, shards: list[ShardData]) -> Committed:
        """Step 4, on rank 0: the checkpoint exists when this returns."""
        files, tensors = merge_shards(shards)
        if ticket.options.format is CheckpointFormat.CONSOLIDATED:
            files = (*files, *self._write_index(ticket, tensors))
        # A tied tensor is written once; under each of its names the manifest points to the same bytes.
        tensors |= {name: tensors[first] for name, first in ticket.ties.items()}
        manifest = self._manifest(ticket, files, dict(sorted(tensors.items())))
        check_manifest(manifest)
        for plan in ticket.plans:
            if plan.part is not None:
                self._store.delete(plan.part.key)
        store_index.check_claim(self._store, ticket.intent)
        self._faults.commit(manifest)
        # From here on nothing may fail the save; a sweep would find this announcement of a finished one.
        with contextlib.suppress(TensorForgeError):
            store_index.withdraw(self._store, ticket.intent)
        return Committed(manifest.prefix, content_digest(manifest))

    def _write_index(
        self,
        ticket: Ticket,
        tensors: dict[str, TensorMetadata],
    ) -> tuple[FileEntry, ...]:
        options = ticket.options
        if options.compression_level is not CompressionLevel.NONE or options.increment is not None:
            return ()  # other libraries cannot read frames, so there is nothing to point them to
        names = {plan.key: plan for rank in ticket.plans for plan in rank.files}
        weight_map = {
            name_in_file(piece.name, piece.shape, piece.box): key.rpartition("/")[2]
            for key, file in names.items()
            for piece in file.pieces
            if piece.name.startswith(MODEL)
        }
        total = sum(t.nbytes for name, t in tensors.items() if name.startswith(MODEL))
        document = index_document(weight_map, total)
        key = index_key(ticket.intent.prefix)
        self._faults.execute_with_retry(lambda: self._store.write(key, document))
        return (FileEntry(key, len(document), len(document), checksum(document)),)

    def _manifest(
        self,
        ticket: Ticket,
        files: tuple[FileEntry, ...],
        tensors: dict[str, TensorMetadata],
    ) -> CheckpointManifest:
        options = ticket.options
        return CheckpointManifest(
            version=VERSION,
            prefix=ticket.intent.prefix,
            save_id=ticket.intent.save_id,
            created_at=datetime.now(UTC),
            world_size=self._coordinator.world_size,
            format=options.format.value,
            compression=options.compression_level.value,
            checksum=CHECKSUM,
            files=files,
            tensors=tensors,
            state=ticket.state,
            custom_metadata=encode_metadata(options.custom_metadata),
            parent=None if options.increment is None else options.increment.parent,
        )

    def _undo(self, ticket: Ticket, *, everybody_stopped: bool) -> None:
        """Remove what was written. Rank 0 also gives up the claim, once nobody can be writing any more."""
        plan = ticket.plans[self._coordinator.rank]
        mine = [file.key for file in (*plan.files, *([plan.part] if plan.part else []))]
        with contextlib.suppress(TensorForgeError):
            for key in mine:
                self._store.delete(key)
            if self._coordinator.rank == 0 and everybody_stopped:
                self._faults.rollback(ticket.intent.prefix)


def encode_metadata(metadata: Mapping[str, Any]) -> Any:
    """A caller's metadata as a tree; it holds no tensors."""
    return encode_tree(dict(metadata), lambda _value, _where: None, "custom_metadata")


def content_digest(manifest: CheckpointManifest) -> str:
    """A digest of the tensors' content: equal states have equal ones, however they are stored in files.

    Random states are left out, they change all the time.
    """
    lines = [
        f"{name} {chunk.offset} {chunk.shape} {chunk.data.content}"
        for name, tensor in sorted(manifest.tensors.items())
        if not name.startswith(RANDOM)
        for chunk in tensor.chunks
    ]
    return checksum("\n".join(lines).encode())


def _prefix_from_time() -> str:
    moment = datetime.now(UTC)
    return f"checkpoint_{moment:%Y%m%d_%H%M%S}_{uuid.uuid4().hex[:6]}"
