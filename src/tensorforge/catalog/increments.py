"""Incremental saves: reuses the chunks of a parent checkpoint and stores changed chunks as differences.

A chunk is identified by the checksum of its content. If the parent has a chunk with the same content, the
manifest refers to that. A changed chunk is stored as the difference to the parent's chunk of the same box, if a
sample shows that this saves enough, and complete otherwise. A manifest lists every file that it refers to, so a
restore reads one manifest only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.codecs import DifferenceCodec
from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import (
    CheckpointManifest,
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    checksum,
)
from tensorforge.checkpoint.load.stored_chunks import StoredChunks, read_chunk
from tensorforge.checkpoint.save.chunk_reuse import EncodedChunk
from tensorforge.errors import CheckpointError, ConfigurationError
from tensorforge.storage.blobs import BlobStore

_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class IncrementPolicy:
    """When a save is incremental, and when a chunk is stored as a difference.

    `max_chain`: the most checkpoints in a chain, the full one included; the next checkpoint is full.
    `min_saving`: the share of its bytes that a difference must save; otherwise the chunk is stored complete.
    `sample_bytes`: how many bytes of a chunk are encoded as a sample first.
    `base_memory`: how many bytes of the last save stay in memory, so that the next one need not read them.
    """

    max_chain: int = 16
    min_saving: float = 0.1
    sample_bytes: int = 192 << 10
    base_memory: int = 1 << 30

    def __post_init__(self) -> None:
        if not self.max_chain >= 1:
            raise ConfigurationError("max_chain", self.max_chain, "must be at least 1")
        if not 0 <= self.min_saving < 1:
            raise ConfigurationError("min_saving", self.min_saving, "must be from 0 to below 1")
        if not self.sample_bytes >= _SAMPLES * 64:
            raise ConfigurationError("sample_bytes", self.sample_bytes, "must be at least 192")
        if not self.base_memory >= 0:
            raise ConfigurationError("base_memory", self.base_memory, "must not be negative")


class ContentCache:
    """The content of the chunks that were saved last, by checksum, up to a limit. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._content: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> bytes | None:
        """The content with this checksum, or `None`."""
        with self._lock:
            return self._content.get(digest)

    def put(self, digest: str, content: memoryview) -> None:
        """Add a copy of the content; the oldest content is dropped if the limit is exceeded."""
        if len(content) > self._limit:
            return
        with self._lock:
            if digest in self._content:
                self._content.move_to_end(digest)
                return
            self._content[digest] = bytes(content)
            self._size += len(content)
            while self._size > self._limit:
                self._size -= len(self._content.popitem(last=False)[1])


@dataclass(slots=True)
class IncrementTally:
    """Bytes of the state by what became of their chunks.

    `unchanged`: reused from the parent. `differing`: stored as differences, which took `differences` bytes.
    `complete`: stored complete.
    """

    unchanged: int = 0
    differing: int = 0
    differences: int = 0
    complete: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, kind: str, size: int, stored: int = 0) -> None:
        """Count a chunk."""
        with self._lock:
            setattr(self, kind, getattr(self, kind) + size)
            self.differences += stored


class ChangedChunks:
    """Finds the chunks of a state that changed since its parent. Implements the writer's `Increment`."""

    def __init__(
        self,
        store: BlobStore,
        parent: CheckpointManifest,
        policy: IncrementPolicy,
        cache: ContentCache,
    ) -> None:
        self.parent = parent.prefix
        self.files: tuple[FileEntry, ...] = tuple(
            msgspec.structs.replace(file, owner=file.owner or parent.prefix)
            for file in parent.files
        )
        self.tally = IncrementTally()
        self._policy = policy
        self._cache = cache
        self._source = StoredChunks(store, parent)
        self._by_content: dict[tuple[str, int, int], StoredBytes] = {}
        self._by_box: dict[tuple[str, Box], tuple[TensorMetadata, ChunkMetadata]] = {}
        for name, tensor in parent.tensors.items():
            item = ITEM_SIZES[tensor.dtype]
            for chunk in tensor.chunks:
                identity = (chunk.data.content, chunk.box.size * item, item)
                self._by_content.setdefault(identity, chunk.data)
                self._by_box[(name, chunk.box)] = (tensor, chunk)
        self._codec = DifferenceCodec()

    def reuse(
        self, name: str, dtype: str, box: Box, raw: memoryview
    ) -> StoredBytes | EncodedChunk | None:
        """Where the parent has the chunk, or a difference to store; `None` to store the chunk complete."""
        digest = checksum(raw)
        known = self._by_content.get((digest, len(raw), ITEM_SIZES[dtype]))
        if known is not None:
            self.tally.add("unchanged", len(raw))
            return known
        difference = self._difference(name, dtype, box, raw, digest)
        self._cache.put(digest, raw)
        if difference is None:
            self.tally.add("complete", len(raw))
        else:
            self.tally.add("differing", len(raw), len(difference.content))
        return difference

    def _difference(
        self, name: str, dtype: str, box: Box, raw: memoryview, digest: str
    ) -> EncodedChunk | None:
        tensor, chunk = self._by_box.get((name, box), (None, None))
        if tensor is None or chunk is None or tensor.dtype != dtype or not len(raw):
            return None
        base = self._content(name, tensor, chunk)
        item = ITEM_SIZES[dtype]
        if base is None or not self._pays(raw, base, item):
            return None
        encoded = self._codec.encode(raw, item, base)
        if len(encoded) > (1 - self._policy.min_saving) * len(raw):
            return None
        return EncodedChunk(encoded, self._codec.name, digest, chunk.data)

    def _content(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata
    ) -> memoryview | None:
        """The content of a chunk of the parent; `None` if it cannot be read, which must not fail the save."""
        cached = self._cache.get(chunk.data.content)
        if cached is not None:
            return memoryview(cached)
        try:
            return read_chunk(self._source, name, tensor, chunk)
        except CheckpointError:
            return None

    def _pays(self, raw: memoryview, base: memoryview, item: int) -> bool:
        """Whether the difference of a few samples of the chunk saves enough; a small chunk needs no samples."""
        length = self._policy.sample_bytes // _SAMPLES // item * item
        if len(raw) <= _SAMPLES * length:
            return True
        stored = 0
        for number in range(_SAMPLES):
            start = (len(raw) - length) * number // (_SAMPLES - 1) // item * item
            sample = slice(start, start + length)
            stored += len(self._codec.encode(raw[sample], item, base[sample]))
        return stored <= (1 - self._policy.min_saving) * _SAMPLES * length
