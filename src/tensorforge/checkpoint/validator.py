"""Checks of a checkpoint: its manifest and files before a load, and on request every byte.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.format.file_layout import CHUNK_BYTES
from tensorforge.checkpoint.format.manifest import CheckpointManifest, ChunkMetadata, TensorMetadata
from tensorforge.checkpoint.load.stored_chunks import StoredChunks, read_chunk
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.parallel import ByteCounter, Deadline, run_parallel
from tensorforge.errors import CheckpointError, CheckpointErrorType
from tensorforge.storage.blobs import BlobStore

WORKERS = 4


class Severity(Enum):
    """Whether a finding prevents loading."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    severity: Severity
    message: str
    type: CheckpointErrorType = CheckpointErrorType.VALIDATION_FAILED


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings of all checks about one checkpoint."""

    prefix: str
    findings: tuple[Finding, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether no finding prevents loading."""
        return not self.errors

    @property
    def has_warnings(self) -> bool:
        """Whether there are findings that do not prevent loading."""
        return len(self.errors) < len(self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that prevent loading."""
        return tuple(item for item in self.findings if item.severity is Severity.ERROR)

    def summary(self) -> str:
        """All findings, one per line."""
        if not self.findings:
            return f"{self.prefix} is intact"
        return "\n".join(f"{item.severity.value}: {item.message}" for item in self.findings)

    def raise_if_invalid(self) -> None:
        """Raise the first error as a `CheckpointError`."""
        if self.errors:
            first = self.errors[0]
            raise CheckpointError(first.message, self.prefix, first.type)


class IntegrityChecker(Protocol):
    """Checks the files of a checkpoint."""

    def check(self, storage: BlobStore, manifest: CheckpointManifest) -> Iterable[Finding]:
        """The faults of the files."""


class CompatibilityChecker(Protocol):
    """Checks whether this program can use a checkpoint."""

    def check(self, manifest: CheckpointManifest) -> Iterable[Finding]:
        """The reasons against using the checkpoint."""


class FilesAreComplete:
    """Checks that every file exists, has the right size and an intact header. Reads no tensor."""

    def check(self, storage: BlobStore, manifest: CheckpointManifest) -> Iterator[Finding]:
        """A finding for each missing or damaged file."""
        source = StoredChunks(storage, manifest)
        for file in manifest.files:
            try:
                source.check_file(file)
            except CheckpointError as error:
                yield Finding(Severity.ERROR, str(error), error.type)


class EveryByteIsIntact:
    """Reads and decodes every chunk of every tensor and compares the checksums.

    With `only_own`, chunks in the files of other checkpoints are not read.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        workers: int = WORKERS,
        *,
        only_own: bool = False,
    ) -> None:
        self._progress = progress
        self._workers = workers
        self._only_own = only_own

    def check(self, storage: BlobStore, manifest: CheckpointManifest) -> Iterator[Finding]:
        """A finding for each damaged chunk."""
        source = StoredChunks(storage, manifest)
        found: list[Finding] = []
        chunks = [
            (name, tensor, chunk)
            for name, tensor in manifest.tensors.items()
            for chunk in tensor.chunks
            if not (self._only_own and manifest.files[chunk.data.file].owner)
        ]
        chunks.sort(key=lambda item: (item[2].data.file, item[2].data.start))
        counter = ByteCounter(sum(chunk.data.length for _, _, chunk in chunks), self._progress)

        def verify(
            name: str, tensor: TensorMetadata, chunk: ChunkMetadata, scratch: memoryview
        ) -> None:
            try:
                read_chunk(source, name, tensor, chunk, scratch)
            except CheckpointError as error:
                found.append(Finding(Severity.ERROR, str(error), error.type))
            counter.add(chunk.data.length)

        tasks = [functools.partial(verify, *chunk) for chunk in chunks]
        run_parallel(tasks, _scratch, workers=self._workers, deadline=Deadline(), what="verifying")
        yield from found


@contextlib.contextmanager
def _scratch() -> Iterator[memoryview]:
    yield memoryview(bytearray(CHUNK_BYTES))


class CheckpointValidator:
    """Runs checkers on a checkpoint: always `FilesAreComplete`, then those that the caller passes."""

    def __init__(
        self,
        storage: BlobStore,
        integrity_checkers: Sequence[IntegrityChecker] = (),
        compatibility_checkers: Sequence[CompatibilityChecker] = (),
    ) -> None:
        self._storage = storage
        self._integrity = (FilesAreComplete(), *integrity_checkers)
        self._compatibility = tuple(compatibility_checkers)

    def validate(self, prefix: str) -> ValidationReport:
        """Check a checkpoint. A bad one gives a report with errors; this raises nothing for it."""
        try:
            manifest = store_index.read_manifest(self._storage, prefix)
        except CheckpointError as error:
            return ValidationReport(prefix, (Finding(Severity.ERROR, str(error), error.type),))
        return self.validate_manifest(manifest)

    def validate_manifest(self, manifest: CheckpointManifest) -> ValidationReport:
        """Check a checkpoint whose manifest has been read."""
        findings = [item for checker in self._compatibility for item in checker.check(manifest)]
        for integrity in self._integrity:
            findings.extend(integrity.check(self._storage, manifest))
        return ValidationReport(manifest.prefix, tuple(findings))
