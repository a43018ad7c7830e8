"""The load protocol. All ranks load the same checkpoint, or all raise the same error.

1. Rank 0 chooses a checkpoint and validates it; everybody gets its manifest.
2. Everybody matches it with what it holds; what does not match is collected from all ranks.
3. Everybody reads its boxes, each chunk verified.
4. If a chunk was damaged anywhere and the caller did not insist on this checkpoint, all go back to 1 with
   the next older one. Otherwise the states are handed over.
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
from tensorforge.checkpoint.load.chunks import StoredChunks
from tensorforge.checkpoint.load.targets import Targets, tensor_names, whole_tensor
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
from tensorforge.checkpoint.parallel import Guard
from tensorforge.checkpoint.ranks.coordinators import DistributedCoordinator
from tensorforge.checkpoint.ranks.rounds import Failure, Round, failure_of
from tensorforge.checkpoint.validator import CheckpointValidator
from tensorforge.errors import CheckpointError, CheckpointErrorType
from tensorforge.storage.blobs import BlobStore

_LOAD_FAILED = CheckpointErrorType.LOAD_FAILED
_FALL_BACK = (
    CheckpointErrorType.CORRUPTED_CHECKPOINT,
    CheckpointErrorType.INCOMPATIBLE_VERSION,
    CheckpointErrorType.VALIDATION_FAILED,
)


class CheckpointFallbackWarning(UserWarning):
    """A newer checkpoint could not be trusted, so an older one was loaded."""


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
    """One checkpoint being loaded on this rank."""

    manifest: CheckpointManifest
    targets: Targets
    random: dict[str, Any] = field(default_factory=dict)


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
        guard: Guard,
        progress: Progress | None,
    ) -> CheckpointLoadResult:
        """Load a checkpoint; see the module's docstring."""
        candidates = self._candidates(options)
        rejected: list[Rejected] = []
        while True:
            manifest, rejected = self._choose(candidates, options, rejected, guard)
            attempt, mismatch = self._match(manifest, model, optimizer, options, guard)
            reason = self._read(attempt, options, guard, progress)
            if reason is None:
                self._say_what_was_rejected(manifest, rejected)
                return self._hand_over(attempt, mismatch, rejected, model, optimizer, options)
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
        guard: Guard,
    ) -> tuple[CheckpointManifest, list[Rejected]]:
        chosen: list[CheckpointManifest] = []  # on rank 0, which need not decode what it encoded

        def decide(_reports: list[None]) -> _Choice:
            passed_over = list(rejected)
            for prefix in candidates:
                try:
                    manifest = self._validated(prefix, options)
                except CheckpointError as error:
                    if options.checkpoint_prefix is not None or error.type not in _FALL_BACK:
                        raise
                    passed_over.append(Rejected(prefix, str(error)))
                else:
                    chosen.append(manifest)
                    return _Choice(encode_manifest(manifest), manifest.key, passed_over)
            raise self._nothing_left(passed_over)

        choice: _Choice = self._round(type(None), _Choice).agree(None, decide, guard)
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
        reasons = "; ".join(f"{item.prefix}: {item.reason}" for item in rejected)
        return CheckpointError(
            f"no checkpoint in {self._store.url} can be trusted: {reasons}",
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
        guard: Guard,
    ) -> tuple[_Attempt, Mismatch]:
        """Step 2: find the memory for every tensor and what does not match, on any rank."""
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
            mine = _Match(sorted(targets.wanted), targets.mismatch())
        except Exception as error:  # noqa: BLE001  reported to the others, raised on every rank
            mine = failure_of(error, _LOAD_FAILED)

        def decide(reports: list[_Match]) -> Mismatch:
            mismatch = _unite(manifest, reports, with_optimizer=with_optimizer)
            if mismatch and options.strict_mode:
                raise CheckpointError(
                    f"{manifest.prefix} does not match: {mismatch.summary()}",
                    manifest.key,
                    _LOAD_FAILED,
                )
            return mismatch

        return attempt, self._round(_Match, Mismatch).agree(mine, decide, guard)

    def _add_random_state(self, attempt: _Attempt) -> None:
        tree = attempt.manifest.state.get("rng", {}).get(str(self._coordinator.rank))
        if tree is None or attempt.manifest.world_size != self._coordinator.world_size:
            return
        for name in tensor_names(tree):
            tensor = whole_tensor(attempt.manifest.tensors[name])
            attempt.random[name] = tensor
            attempt.targets.add_tensor(name, tensor)

    def _read(
        self,
        attempt: _Attempt,
        options: LoadOptions,
        guard: Guard,
        progress: Progress | None,
    ) -> str | None:
        """Step 3; returns why the checkpoint must be given up for an older one, or `None`."""
        destinations = attempt.targets.destinations
        source = StoredChunks(self._store, attempt.manifest, self._faults.retry_policy)
        workers = WORKERS if options.resharding_strategy == "parallel" else 1
        mine: _Done | Failure
        try:
            read_tensors(source, destinations, guard=guard, progress=progress, workers=workers)
            mine = _Done()
        except Exception as error:  # noqa: BLE001  reported to the others, raised on every rank
            mine = failure_of(error, _LOAD_FAILED)
        if (
            isinstance(mine, Failure)
            and options.checkpoint_prefix is None
            and mine.type in _FALL_BACK
        ):
            mine = _Done(mine.message)

        def decide(reports: list[_Done]) -> _Done:
            return next((report for report in reports if report.rejection), _Done())

        done: _Done = self._round(_Done, _Done).agree(mine, decide, guard)
        return done.rejection

    def _hand_over(
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

    def _say_what_was_rejected(
        self, manifest: CheckpointManifest, rejected: list[Rejected]
    ) -> None:
        if rejected:
            reasons = "; ".join(f"{item.prefix}: {item.reason}" for item in rejected)
            warnings.warn(
                f"loaded {manifest.prefix} instead of a newer checkpoint ({reasons})",
                CheckpointFallbackWarning,
                stacklevel=4,
            )


def _unite(
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
