"""The save protocol. Every step ends in a decision of rank 0, so that all ranks succeed or all fail.

1. Every rank reports its boxes of tensors. Rank 0 sweeps up after crashed saves, claims the prefix and plans.
2. If a rank must write a tensor that has boxes on other ranks, those write the boxes to exchange files.
3. Every rank writes its files durably and reports their chunks.
4. Rank 0 checks that the chunks cover every tensor and creates the manifest. Now the checkpoint exists.

If a step fails, every rank removes the files that it wrote; the next save removes those of a dead rank.
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
from tensorforge.checkpoint.format.boxes import Box, TensorBox
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
from tensorforge.checkpoint.load.stored_chunks import StoredChunks
from tensorforge.checkpoint.load.tensor_reader import Destination, read_tensors
from tensorforge.checkpoint.model_state import CapturedState
from tensorforge.checkpoint.options import Progress, SaveOptions
from tensorforge.checkpoint.parallel import ByteCounter, Deadline
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.checkpoint.ranks.rounds import Failure, RankTimeoutError, Round, failure_of
from tensorforge.checkpoint.save.assignment import agreed_ties
from tensorforge.checkpoint.save.file_contents import FileContents, RankMemory
from tensorforge.checkpoint.save.shard_writer import WORKERS, WrittenFile, write_file
from tensorforge.checkpoint.save.staging import StagingArea
from tensorforge.checkpoint.save.write_plan import RankPlan, plan_files
from tensorforge.errors import CheckpointErrorType, TensorForgeError
from tensorforge.storage.blobs import BlobStore

_SAVE_FAILED = CheckpointErrorType.SAVE_FAILED
_SWEEP_SECONDS = 600.0


class RankState(msgspec.Struct, frozen=True):
    """The report of a rank: its boxes of tensors, its trees without tensors, and its tied tensors."""

    boxes: list[TensorBox]
    trees: dict[str, Any]
    ties: dict[str, str]


class SavePlan(msgspec.Struct, frozen=True):
    """The decision of rank 0: the claim, the plan of each rank, and the ties that all ranks agree about."""

    claim: store_index.SaveClaim
    plans: list[RankPlan]
    ties: dict[str, str]


class ExchangedBoxes(msgspec.Struct, frozen=True):
    """The boxes that all ranks left in exchange files."""

    shards: list[ShardData]


class Committed(msgspec.Struct, frozen=True):
    """A checkpoint that exists; `content` is a digest of its tensors."""

    prefix: str
    content: str


@dataclass(slots=True)
class SaveInProgress:
    """A save of this rank between its plan and its commit.

    `ready` are the files whose bytes are all on this rank, `incomplete` those that lack boxes of other ranks.
    `scattered` are the names of the tensors that exchange files are about.
    """

    claim: store_index.SaveClaim
    plans: list[RankPlan]
    captured: CapturedState
    options: SaveOptions
    ties: dict[str, str]
    state: dict[str, Any] = field(default_factory=dict)
    ready: list[FileContents] = field(default_factory=list)
    incomplete: list[FileContents] = field(default_factory=list)
    exchange: FileContents | None = None
    is_open: bool = False
    failure: Failure | None = None
    memory: RankMemory = field(init=False)
    scattered: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = RankMemory(self.captured, self.ties)
        files = (plan.exchange for plan in self.plans if plan.exchange is not None)
        self.scattered = frozenset(each.name for file in files for each in file.boxes)


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
        capture: Callable[[], CapturedState],
        options: SaveOptions,
        deadline: Deadline,
    ) -> SaveInProgress:
        """Step 1. Neither copies nor changes the tensors."""
        captured = CapturedState()
        mine: RankState | Failure
        try:
            captured = capture()
            mine = RankState(captured.boxes(), captured.trees, captured.ties)
        except Exception as error:  # noqa: BLE001  reported to rank 0, raised on every rank
            mine = failure_of(error, _SAVE_FAILED)
        state: dict[str, Any] = {}

        def decide(reports: list[RankState]) -> SavePlan:
            state.update(merge_trees([report.trees for report in reports]))
            return self._decide(reports, options, deadline)

        decision = self._round(RankState, SavePlan).agree(mine, decide, deadline)
        return SaveInProgress(
            decision.claim, decision.plans, captured, options, decision.ties, state
        )

    def _decide(
        self, reports: list[RankState], options: SaveOptions, deadline: Deadline
    ) -> SavePlan:
        prefix = options.checkpoint_prefix or _prefix_from_time()
        rank_boxes = [report.boxes for report in reports]
        ties = agreed_ties(rank_boxes, [report.ties for report in reports])
        plans = plan_files(
            options.format,
            prefix,
            [[each for each in boxes if each.name not in ties] for boxes in rank_boxes],
            compressed=_is_encoded(options),
        )
        self._sweep_if_due()
        claim = store_index.claim_prefix(self._store, prefix, len(reports), deadline.timeout)
        return SavePlan(claim, plans, ties)

    def _sweep_if_due(self) -> None:
        """Sweep at the first save, after a failed one, and every ten minutes; a sweep lists the store."""
        if time.monotonic() >= self._next_sweep:
            store_index.sweep(self._store)
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS

    def _round(self, report: type[Any], decision: type[Any]) -> Round[Any, Any]:
        return Round(self._coordinator, report, decision, _SAVE_FAILED)

    def stage(self, save: SaveInProgress, staging: StagingArea, deadline: Deadline) -> None:
        """Copy everything that this rank will write; afterwards the caller may change the state.

        A failure is kept for `write`, which the caller must call in any case, so that the others learn of it.
        """
        try:
            self._open_files(save, copied=True)
            exchange = [save.exchange] if save.exchange else []
            staging.stage([*save.ready, *exchange], deadline, WORKERS)
        except Exception as error:  # noqa: BLE001  reported to rank 0, raised on every rank
            save.failure = failure_of(error, _SAVE_FAILED)

    def _open_files(self, save: SaveInProgress, *, copied: bool = False) -> None:
        """Find the bytes of this rank's files in memory.

        With `copied`, the tensors of incomplete files are copied, because such a file cannot be staged.
        Otherwise nothing is copied.
        """
        plan = save.plans[self._coordinator.rank]
        memory = save.memory
        if plan.exchange is not None:
            save.exchange = memory.contents(plan.exchange, headless=True)
        for file in plan.files:
            if any(each.name in save.scattered for each in file.boxes):
                contents = memory.assembled_contents(file, save.scattered, copied=copied)
                save.incomplete.append(contents)
            else:
                save.ready.append(memory.contents(file))
        save.is_open = True

    def write(
        self, save: SaveInProgress, deadline: Deadline, progress: Progress | None
    ) -> Committed:
        """Steps 2 to 4. If this raises, this rank has removed the files that it wrote."""

        def write() -> ShardData:
            self._complete_tensors(save, exchanged, deadline)
            files = [*save.ready, *save.incomplete]
            counter = ByteCounter(sum(file.plan.size for file in files), progress)
            return self._write_files(files, save.options, deadline, counter)

        try:
            exchanged = self._exchange_boxes(save, deadline) if save.scattered else []
            mine = self._result_of(save, write)
            commit = functools.partial(self._commit, save)
            committed: Committed = self._round(ShardData, Committed).agree(mine, commit, deadline)
            return committed
        except BaseException as error:
            self._next_sweep = 0.0
            self._undo(save, all_stopped=not isinstance(error, RankTimeoutError))
            raise

    def _result_of(
        self, save: SaveInProgress, work: Callable[[], ShardData]
    ) -> ShardData | Failure:
        """The result of some work as a report to rank 0, or the failure of this rank."""
        if save.failure is not None:
            return save.failure
        try:
            if not save.is_open:
                self._open_files(save)
            return work()
        except Exception as error:  # noqa: BLE001  raised on every rank
            return failure_of(error, _SAVE_FAILED)

    def _write_files(
        self,
        files: list[FileContents],
        options: SaveOptions,
        deadline: Deadline,
        counter: ByteCounter,
    ) -> ShardData:
        written = [self._write_file(file, options, deadline, counter) for file in files]
        shards = [ShardData(0, file.files, file.tensors) for file in written]
        return ShardData(self._coordinator.rank, *merge_shards(shards))

    def _write_file(
        self,
        contents: FileContents,
        options: SaveOptions,
        deadline: Deadline,
        counter: ByteCounter,
    ) -> WrittenFile:
        codec = encoder_for(options.compression_level)

        def attempt() -> WrittenFile:
            # The prefix is claimed, so a file with this key can only be from an earlier attempt of this save.
            self._store.delete(contents.plan.key)
            return write_file(self._store, contents, codec, deadline, counter, options.increment)

        return self._faults.execute_with_retry(attempt)

    def _exchange_boxes(self, save: SaveInProgress, deadline: Deadline) -> list[ShardData]:
        """Step 2: write the exchange file of this rank, and return what all ranks wrote."""

        def write() -> ShardData:
            files = [save.exchange] if save.exchange else []
            return self._write_files(files, SaveOptions(), deadline, ByteCounter(0, None))

        mine = self._result_of(save, write)
        exchanged: ExchangedBoxes = self._round(ShardData, ExchangedBoxes).agree(
            mine, ExchangedBoxes, deadline
        )
        return exchanged.shards

    def _complete_tensors(
        self, save: SaveInProgress, exchanged: list[ShardData], deadline: Deadline
    ) -> None:
        """Read the boxes that the incomplete tensors of this rank lack from the exchange files."""
        incomplete = save.memory.incomplete
        if not incomplete:
            return
        files, tensors = merge_shards(exchanged)
        destinations = [
            Destination(name, Box.full(tuple(tensor.shape)), tensor)
            for name, tensor in incomplete.items()
            if name in tensors
        ]
        manifest = self._manifest(save, files, tensors)
        source = StoredChunks(self._store, manifest, self._faults.retry_policy)
        read_tensors(source, destinations, deadline=deadline)

    def _commit(self, save: SaveInProgress, shards: list[ShardData]) -> Committed:
        """Step 4, on rank 0. The checkpoint exists when this returns."""
        files, tensors = merge_shards(shards)
        if save.options.format is CheckpointFormat.CONSOLIDATED:
            files = (*files, *self._write_index(save, tensors))
        # A tied tensor is written once; the manifest has the same chunks under each of its names.
        tensors |= {name: tensors[first] for name, first in save.ties.items()}
        manifest = self._manifest(save, files, dict(sorted(tensors.items())))
        check_manifest(manifest)
        for plan in save.plans:
            if plan.exchange is not None:
                self._store.delete(plan.exchange.key)
        store_index.check_claim(self._store, save.claim)
        self._faults.commit(manifest)
        # The save has succeeded, so a failure from here on is ignored; a sweep removes a claim that is left.
        with contextlib.suppress(TensorForgeError):
            store_index.release_claim(self._store, save.claim)
        return Committed(manifest.prefix, content_digest(manifest))

    def _write_index(
        self,
        save: SaveInProgress,
        tensors: dict[str, TensorMetadata],
    ) -> tuple[FileEntry, ...]:
        if _is_encoded(save.options):
            return ()  # other libraries cannot read encoded files, so an index would be of no use
        weight_map = {
            name_in_file(each): file.key.rpartition("/")[2]
            for plan in save.plans
            for file in plan.files
            for each in file.boxes
            if each.name.startswith(MODEL)
        }
        total = sum(t.nbytes for name, t in tensors.items() if name.startswith(MODEL))
        document = index_document(weight_map, total)
        key = index_key(save.claim.prefix)
        self._faults.execute_with_retry(lambda: self._store.write(key, document))
        return (FileEntry(key, len(document), len(document), checksum(document)),)

    def _manifest(
        self,
        save: SaveInProgress,
        files: tuple[FileEntry, ...],
        tensors: dict[str, TensorMetadata],
    ) -> CheckpointManifest:
        options = save.options
        return CheckpointManifest(
            version=VERSION,
            prefix=save.claim.prefix,
            save_id=save.claim.save_id,
            created_at=datetime.now(UTC),
            world_size=self._coordinator.world_size,
            format=options.format.value,
            compression=options.compression_level.value,
            checksum=CHECKSUM,
            files=files,
            tensors=tensors,
            state=save.state,
            custom_metadata=encode_metadata(options.custom_metadata),
            parent=None if options.increment is None else options.increment.parent,
        )

    def _undo(self, save: SaveInProgress, *, all_stopped: bool) -> None:
        """Remove the files of this rank. If all ranks have stopped writing, rank 0 also removes the claim."""
        plan = save.plans[self._coordinator.rank]
        files = plan.files if plan.exchange is None else (*plan.files, plan.exchange)
        with contextlib.suppress(TensorForgeError):
            for file in files:
                self._store.delete(file.key)
            if self._coordinator.rank == 0 and all_stopped:
                self._faults.rollback(save.claim.prefix)


def _is_encoded(options: SaveOptions) -> bool:
    """Whether files have encoded chunks instead of the layout of safetensors."""
    return options.compression_level is not CompressionLevel.NONE or options.increment is not None


def encode_metadata(metadata: Mapping[str, Any]) -> Any:
    """The caller's metadata as a JSON tree; a tensor in it is an error."""
    return encode_tree(dict(metadata), lambda _value, _where: None, "custom_metadata")


def content_digest(manifest: CheckpointManifest) -> str:
    """A digest of the tensors. It is equal for equal states, whichever files have their chunks.

    Random states are left out, because they change with every random number.
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
