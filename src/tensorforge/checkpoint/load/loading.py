"""The load protocol. All ranks load the same checkpoint, or all raise the same error.

1. Rank 0 chooses a checkpoint, validates it and sends its manifest to all ranks.
2. Every rank matches the manifest with its model and optimizer. Rank 0 collects the mismatches.
3. Every rank reads the boxes that it needs and verifies each chunk.
4. If any rank found a damaged chunk and the caller named no prefix, all ranks start again at 1 with the next
   older checkpoint. Otherwise every rank passes the state to its model and optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.faults import FaultToleranceHandler
from tensorforge.checkpoint.format.file_layout import MODEL, OPTIMIZER, RANDOM
from tensorforge.checkpoint.format.manifest import (
    CheckpointManifest,
    checksum,
    decode_manifest,
    encode_manifest,
    manifest_key,
)
from tensorforge.checkpoint.format.state_trees import decode_tree
from tensorforge.checkpoint.load.stored_chunks import StoredChunks
from tensorforge.checkpoint.load.targets import Targets, allocate_tensor, tensor_names
from tensorforge.checkpoint.load.tensor_reader import WORKERS, read_tensors
from tensorforge.checkpoint.model_state import (
    derive_random_state,
    restore_random_state,
    tree_reader,
)
from tensorforge.checkpoint.options import (
    CheckpointLoadResult,
    LoadOptions,
    Mismatch,
    Progress,
    RandomStateOutcome,
    Rejected,
    Stateful,
)
from tensorforge.checkpoint.parallel import Deadline
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.checkpoint.ranks.rounds import Failure, Round, failure_of
from tensorforge.checkpoint.validator import CheckpointValidator
from tensorforge.errors import CheckpointError, CheckpointErrorType, TensorForgeError
from tensorforge.storage.blobs import BlobStore

_LOAD_FAILED = CheckpointErrorType.LOAD_FAILED
_FALL_BACK = (
    CheckpointErrorType.CORRUPTED_CHECKPOINT,
    CheckpointErrorType.INCOMPATIBLE_VERSION,
    CheckpointErrorType.VALIDATION_FAILED,
)


class CheckpointFallbackWarning(UserWarning):
    """A newer checkpoint is damaged, so an older one was loaded."""


class _Choice(msgspec.Struct, frozen=True):
    document: bytes
    key: str
    rejected: list[Rejected]


class _Match(msgspec.Struct, frozen=True):
    wanted: list[str]
    mismatch: Mismatch


class _Done(msgspec.Struct, frozen=True):
    rejection: str | None = None


@dataclass(slots=True)
class _Attempt:
    """One attempt of this rank to load one checkpoint."""

    manifest: CheckpointManifest
    targets: Targets
    random: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class Loader:
    """The load protocol for one rank."""

    def __init__(
        self,
        coordinator: DistributedCoordinator,
        store: BlobStore,
        faults: FaultToleranceHandler,
        validator: CheckpointValidator,
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._faults = faults
        self._validator = validator

    def load(
        self,
        model: Stateful,
        optimizer: Stateful | None,
        options: LoadOptions,
        deadline: Deadline,
        progress: Progress | None,
    ) -> CheckpointLoadResult:
        """Load a checkpoint by the protocol in the module's docstring."""
        candidates = self._candidates(options)
        rejected: list[Rejected] = []
        while True:
            manifest, rejected = self._choose(candidates, options, rejected, deadline)
            attempt, mismatch = self._match(manifest, model, optimizer, options, deadline)
            reason = self._read(attempt, options, deadline, progress)
            if reason is None:
                _warn_about_rejected(manifest, rejected)
                return self._finish(attempt, mismatch, rejected, model, optimizer, options)
            rejected.append(Rejected(manifest.prefix, reason))

    def _candidates(self, options: LoadOptions) -> Iterator[str]:
        if self._coordinator.rank:
            return iter(())
        if options.checkpoint_prefix is not None:
            return iter((options.checkpoint_prefix,))
        return iter(store_index.prefixes_by_age(self._store))

    def _choose(
        self,
        candidates: Iterator[str],
        options: LoadOptions,
        rejected: list[Rejected],
        deadline: Deadline,
    ) -> tuple[CheckpointManifest, list[Rejected]]:
        """Step 1. Returns the manifest, and the checkpoints that were rejected so far."""
        chosen: list[CheckpointManifest] = []  # on rank 0, which need not decode its own document

        def decide(_reports: list[None]) -> _Choice:
            skipped = list(rejected)
            for prefix in candidates:
                try:
                    manifest = self._validated(prefix, options)
                except TensorForgeError as error:
                    if options.checkpoint_prefix is not None or not _may_fall_back(error):
                        raise
                    skipped.append(Rejected(prefix, str(error)))
                else:
                    chosen.append(manifest)
                    return _Choice(encode_manifest(manifest), manifest.key, skipped)
            raise self._nothing_left(skipped)

        choice: _Choice = self._round(type(None), _Choice).agree(None, decide, deadline)
        manifest = chosen[0] if chosen else decode_manifest(choice.document, choice.key)
        return manifest, list(choice.rejected)

    def _validated(self, prefix: str, options: LoadOptions) -> CheckpointManifest:
        manifest = self._faults.execute_with_retry(
            lambda: store_index.read_manifest(self._store, prefix)
        )
        if not options.skip_validation:
            report = self._validator.validate_manifest(manifest)
            report.raise_if_invalid()
            for finding in report.findings:
                warnings.warn(f"{prefix}: {finding.message}", UserWarning, stacklevel=2)
        return manifest

    def _nothing_left(self, rejected: list[Rejected]) -> CheckpointError:
        if not rejected:
            return CheckpointError(
                f"there is no checkpoint in {self._store.url}", self._store.url, _LOAD_FAILED
            )
        return CheckpointError(
            f"no checkpoint in {self._store.url} is intact: {_reasons(rejected)}",
            manifest_key(rejected[0].prefix),
            CheckpointErrorType.CORRUPTED_CHECKPOINT,
        )

    def _round(self, report: type[Any], decision: type[Any]) -> Round[Any, Any]:
        return Round(self._coordinator, report, decision, _LOAD_FAILED)

    def _match(
        self,
        manifest: CheckpointManifest,
        model: Stateful,
        optimizer: Stateful | None,
        options: LoadOptions,
        deadline: Deadline,
    ) -> tuple[_Attempt, Mismatch]:
        """Step 2. Returns the destinations of this rank, and the mismatches of all ranks."""
        targets = Targets(manifest)
        attempt = _Attempt(manifest, targets)
        with_optimizer = optimizer is not None and options.load_optimizer
        mine: _Match | Failure
        try:
            targets.add_stateful("model", model)
            if with_optimizer:
                targets.add_optimizer(optimizer, model)
            if options.load_rng_state:
                self._add_random_state(attempt)
            attempt.extra = self._allocate(attempt, manifest.state.get("extra"))
            mine = _Match(sorted(targets.wanted), targets.mismatch())
        except Exception as error:  # noqa: BLE001  reported to rank 0, raised on every rank
            mine = failure_of(error, _LOAD_FAILED)

        def decide(reports: list[_Match]) -> Mismatch:
            mismatch = _all_mismatches(manifest, reports, with_optimizer=with_optimizer)
            if mismatch and options.strict_mode:
                raise CheckpointError(
                    f"{manifest.prefix} does not match: {mismatch.summary()}",
                    manifest.key,
                    _LOAD_FAILED,
                )
            return mismatch

        return attempt, self._round(_Match, Mismatch).agree(mine, decide, deadline)

    def _add_random_state(self, attempt: _Attempt) -> None:
        tree = attempt.manifest.state.get("rng", {}).get(str(self._coordinator.rank))
        if tree is None or attempt.manifest.world_size != self._coordinator.world_size:
            return
        attempt.random = self._allocate(attempt, tree)

    def _allocate(self, attempt: _Attempt, tree: Any) -> dict[str, Any]:
        """New memory for all tensors of a saved tree, which the load fills."""
        tensors = {}
        for name in tensor_names(tree):
            tensor = tensors[name] = allocate_tensor(attempt.manifest.tensors[name])
            attempt.targets.add_tensor(name, tensor)
        return tensors

    def _read(
        self,
        attempt: _Attempt,
        options: LoadOptions,
        deadline: Deadline,
        progress: Progress | None,
    ) -> str | None:
        """Step 3. Returns why all ranks must try an older checkpoint, or `None` if they need not."""
        destinations = attempt.targets.destinations
        source = StoredChunks(self._store, attempt.manifest, self._faults.retry_policy)
        workers = WORKERS if options.resharding_strategy == "parallel" else 1
        mine: _Done | Failure
        try:
            read_tensors(
                source, destinations, deadline=deadline, progress=progress, workers=workers
            )
            mine = _Done()
        except Exception as error:  # noqa: BLE001  reported to rank 0, raised on every rank
            mine = failure_of(error, _LOAD_FAILED)
        if (
            isinstance(mine, Failure)
            and options.checkpoint_prefix is None
            and mine.type in _FALL_BACK
        ):
            mine = _Done(mine.message)

        def decide(reports: list[_Done]) -> _Done:
            return next((report for report in reports if report.rejection), _Done())

        done: _Done = self._round(_Done, _Done).agree(mine, decide, deadline)
        return done.rejection

    def _finish(
        self,
        attempt: _Attempt,
        mismatch: Mismatch,
        rejected: list[Rejected],
        model: Stateful,
        optimizer: Stateful | None,
        options: LoadOptions,
    ) -> CheckpointLoadResult:
        manifest = attempt.manifest
        attempt.targets.finish(strict=options.strict_mode)
        random_state = self._restore_random_state(attempt, options)
        world_size = self._coordinator.world_size
        loaded = optimizer if options.load_optimizer else None
        return CheckpointLoadResult(
            manifest=manifest,
            model_state=model.state_dict(),
            optimizer_state=loaded.state_dict() if loaded is not None else {},
            source_world_size=manifest.world_size,
            target_world_size=world_size,
            was_resharded=manifest.world_size != world_size,
            custom_metadata=decode_tree(manifest.custom_metadata or {}, tree_reader({})),
            extra_state=decode_tree(
                manifest.state.get("extra", {}), tree_reader(attempt.extra), "extra"
            ),
            mismatch=mismatch,
            rejected=tuple(rejected),
            random_state=random_state,
        )

    def _restore_random_state(self, attempt: _Attempt, options: LoadOptions) -> RandomStateOutcome:
        saved = attempt.manifest.state.get("rng")
        if not saved or not options.load_rng_state:
            return RandomStateOutcome.SKIPPED
        rank = self._coordinator.rank
        if attempt.random:
            restore_random_state(decode_tree(saved[str(rank)], tree_reader(attempt.random)))
            return RandomStateOutcome.EXACT
        derive_random_state(_random_digest(attempt.manifest), rank, self._coordinator.world_size)
        return RandomStateOutcome.DERIVED


def _warn_about_rejected(manifest: CheckpointManifest, rejected: list[Rejected]) -> None:
    if rejected:
        warnings.warn(
            f"loaded {manifest.prefix} instead of a newer checkpoint ({_reasons(rejected)})",
            CheckpointFallbackWarning,
            stacklevel=4,
        )


def _reasons(rejected: list[Rejected]) -> str:
    return "; ".join(f"{item.prefix}: {item.reason}" for item in rejected)


def _all_mismatches(
    manifest: CheckpointManifest, reports: list[_Match], *, with_optimizer: bool
) -> Mismatch:
    wanted = {name for report in reports for name in report.wanted}
    kinds = (MODEL, OPTIMIZER) if with_optimizer else (MODEL,)
    unexpected = [
        name for name in manifest.tensors if name.startswith(kinds) and name not in wanted
    ]
    return Mismatch(
        tuple(dict.fromkeys(name for report in reports for name in report.mismatch.missing)),
        tuple(unexpected),
        tuple(dict.fromkeys(text for report in reports for text in report.mismatch.shapes)),
        tuple(dict.fromkeys(text for report in reports for text in report.mismatch.dtypes)),
    )


def _random_digest(manifest: CheckpointManifest) -> str:
    contents = [
        chunk.data.content
        for name, tensor in sorted(manifest.tensors.items())
        if name.startswith(RANDOM)
        for chunk in tensor.chunks
    ]
    return checksum("".join(contents).encode())


def _may_fall_back(error: TensorForgeError) -> bool:
    """Whether an older checkpoint may be loaded instead: only this one is damaged or cannot be read."""
    if isinstance(error, CheckpointError):
        return error.type in _FALL_BACK
    return store_index.is_unreadable(error)
