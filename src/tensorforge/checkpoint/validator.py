"""Can this checkpoint be trusted? Questions that are asked before it is read, and the proof of every byte.

Starts without torch.
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
from tensorforge.checkpoint.load.chunks import StoredChunks, verify_chunk
from tensorforge.checkpoint.options import Progress
from tensorforge.checkpoint.parallel import Guard, run_parallel
from tensorforge.checkpoint.progress import Meter
from tensorforge.errors import CheckpointError, CheckpointErrorType
from tensorforge.storage.blobs import BlobStore

WORKERS = 4
_FOREVER = 1e9


class Severity(Enum):
    """Whether a finding forbids loading."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a check found."""

    severity: Severity
    message: str
    type: CheckpointErrorType = CheckpointErrorType.VALIDATION_FAILED


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Everything that the checks found about one checkpoint."""

    prefix: str
    findings: tuple[Finding, ...] = ()

    @property
    def is_valid(self) -> bool:
        """Whether nothing forbids loading."""
        return not self.errors

    @property
    def has_warnings(self) -> bool:
        """Whether there is something to look at."""
        return len(self.errors) < len(self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What forbids loading."""
        return tuple(item for item in self.findings if item.severity is Severity.ERROR)

    def summary(self) -> str:
        """All findings, one a line."""
        if not self.findings:
            return f"{self.prefix} is intact"
        return "\n".join(f"{item.severity.value}: {item.message}" for item in self.findings)

    def raise_if_invalid(self) -> None:
        """Raise the first error as a `CheckpointError`."""
        if self.errors:
            first = self.errors[0]
            raise CheckpointError(first.message, self.prefix, first.type)


class IntegrityChecker(Protocol):
    """A check of a checkpoint's files."""

    def check(self, storage: BlobStore, manifest: CheckpointManifest) -> Iterable[Finding]:
        """What is wrong with them."""


class CompatibilityChecker(Protocol):
    """A check whether this program can use a checkpoint."""

    def check(self, manifest: CheckpointManifest) -> Iterable[Finding]:
        """What stands against it."""


class FilesAreComplete:
    """Every file is there, has its size, and an intact header. Reads no tensor."""

    def check(self, storage: BlobStore, manifest: CheckpointManifest) -> Iterator[Finding]:
        """A finding for each file that is not."""
        source = StoredChunks(storage, manifest)
        for file in manifest.files:
            try:
                source.check_file(file)
            except CheckpointError as error:
                yield Finding(Severity.ERROR, str(error), error.type)


class EveryByteIsIntact:
    """Reads and decodes every chunk of every tensor and compares the checksums.

    With `only_own`, chunks in files of other checkpoints are left out.
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
        meter = Meter(sum(chunk.data.length for _, _, chunk in chunks), self._progress)

        def verify(
            name: str, tensor: TensorMetadata, chunk: ChunkMetadata, room: memoryview
        ) -> None:
            try:
                verify_chunk(source, name, tensor, chunk, room)
            except CheckpointError as error:
                found.append(Finding(Severity.ERROR, str(error), error.type))
            meter.add(chunk.data.length)

        tasks = [functools.partial(verify, *chunk) for chunk in chunks]
        run_parallel(tasks, _room, workers=self._workers, guard=Guard(_FOREVER), what="verifying")
        yield from found


@contextlib.contextmanager
def _room() -> Iterator[memoryview]:
    yield memoryview(bytearray(CHUNK_BYTES))


class CheckpointValidator:
    """Asks all checkers about a checkpoint. Without any of one's own it checks manifest and files."""

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
        """Check a checkpoint: manifest, files, and whatever was added. Never raises for a bad one."""
        try:
            manifest = store_index.read_manifest(self._storage, prefix)
        except CheckpointError as error:
            return ValidationReport(prefix, (Finding(Severity.ERROR, str(error), error.type),))
        return self.validate_manifest(manifest)

    def validate_manifest(self, manifest: CheckpointManifest) -> ValidationReport:
        """Check a checkpoint whose manifest was read already."""
        findings = [item for checker in self._compatibility for item in checker.check(manifest)]
        for integrity in self._integrity:
            findings.extend(integrity.check(self._storage, manifest))
        return ValidationReport(manifest.prefix, tuple(findings))
