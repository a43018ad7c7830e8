"""The interface between the writer of an incremental checkpoint and the code that finds reusable chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.manifest import RAW, FileEntry, StoredBytes
from tensorforge.storage.blobs import Buffer


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The bytes to store for a chunk. The fields are those of `StoredBytes`."""

    content: Buffer
    codec: str = RAW
    digest: str | None = None
    base: StoredBytes | None = None


class Increment(Protocol):
    """Finds chunks in an earlier checkpoint. Several threads call it, and after a retry they call it again."""

    @property
    def parent(self) -> str:
        """The prefix of the earlier checkpoint."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files of the earlier checkpoint, each with its owner; results of `reuse` refer to this list."""

    def reuse(
        self, name: str, dtype: str, box: Box, raw: memoryview
    ) -> StoredBytes | EncodedChunk | None:
        """Where the chunk is stored already, or its difference to an earlier chunk.

        `None` lets the writer store the chunk itself.
        """
