"""A save that builds on an earlier checkpoint: the seam between the writer and whoever decides about chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.manifest import RAW, FileEntry, StoredBytes
from tensorforge.storage.blobs import Buffer


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes to be stored for a chunk: how they are encoded, what they decode to, what they start from."""

    content: Buffer
    codec: str = RAW
    digest: str | None = None
    base: StoredBytes | None = None


class Increment(Protocol):
    """Finds chunks in an earlier checkpoint. Called from several threads, more than once after a retry."""

    @property
    def parent(self) -> str:
        """The prefix of the checkpoint that is built on."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """That checkpoint's files, each with its owner; what `place` returns refers to them by number."""

    def place(self, name: str, dtype: str, box: Box, raw: memoryview) -> StoredBytes | Frame | None:
        """Where a chunk lies already, or how to store it; `None` leaves it to the writer."""
