"""What a save can leave out: chunks that an earlier checkpoint holds, and the unchanged part of the others.

A chunk is known by the checksum of its content. One that the parent holds, wherever it lies there, is
referred to. One that changed is stored as the difference to what was at its place, if a sample says that this
pays, and as it is otherwise. A manifest names every file that it needs, so a restore reads no other manifest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.codecs import DifferenceCodec
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.checkpoint.format.manifest import (
    CheckpointManifest,
    ChunkMetadata,
    FileEntry,
    StoredBytes,
    TensorMetadata,
    checksum,
)
from tensorforge.checkpoint.load.chunks import StoredChunks
from tensorforge.checkpoint.save.chunk_reuse import Frame
from tensorforge.errors import CheckpointError, ConfigurationError
from tensorforge.storage.blobs import BlobStore

_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class IncrementPolicy:
    """How far increments go.

    `max_chain`: so many checkpoints in a chain at most, the full one included; then a full one follows.
    `min_saving`: the share of its bytes that a difference must save to be worth decoding later.
    `sample_bytes`: how much of a chunk is tried first.
    `base_memory`: bytes of the last save to keep in memory, so that the next one need not read them back.
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


class ContentMemory:
    """The content of the chunks that were saved last, by checksum, within a limit; safe to share."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._content: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> bytes | None:
        """The content with this checksum, if it is remembered."""
        with self._lock:
            return self._content.get(digest)

    def put(self, digest: str, content: memoryview) -> None:
        """Remember a copy, unless it is remembered already; the oldest make room."""
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
    """How many bytes of the state were found, stored as a difference (and what that took), or stored whole."""

    unchanged: int = 0
    differing: int = 0
    differences: int = 0
    whole: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, kind: str, size: int, stored: int = 0) -> None:
        """Count a chunk."""
        with self._lock:
            setattr(self, kind, getattr(self, kind) + size)
            self.differences += stored


class ChangedChunks:
    """The increment over one parent; the writer asks it about every chunk."""

    def __init__(
        self,
        store: BlobStore,
        parent: CheckpointManifest,
        policy: IncrementPolicy,
        memory: ContentMemory,
    ) -> None:
        self.parent = parent.prefix
        self.files: tuple[FileEntry, ...] = tuple(
            msgspec.structs.replace(file, owner=file.owner or parent.prefix)
            for file in parent.files
        )
        self.tally = IncrementTally()
        self._policy = policy
        self._memory = memory
        self._source = StoredChunks(store, parent)
        self._by_content: dict[tuple[str, int, int], StoredBytes] = {}
        self._by_place: dict[tuple[str, Box], tuple[TensorMetadata, ChunkMetadata]] = {}
        for name, tensor in parent.tensors.items():
            item = ITEM_SIZES[tensor.dtype]
            for chunk in tensor.chunks:
                identity = (chunk.data.content, chunk.box.size * item, item)
                self._by_content.setdefault(identity, chunk.data)
                self._by_place[(name, chunk.box)] = (tensor, chunk)
        self._codec = DifferenceCodec()

    def place(self, name: str, dtype: str, box: Box, raw: memoryview) -> StoredBytes | Frame | None:
        """Where a chunk lies already, or the difference to what was there; `None` to store it whole."""
        digest = checksum(raw)
        known = self._by_content.get((digest, len(raw), ITEM_SIZES[dtype]))
        if known is not None:
            self.tally.add("unchanged", len(raw))
            return known
        frame = self._difference(name, dtype, box, raw, digest)
        self._memory.put(digest, raw)
        if frame is None:
            self.tally.add("whole", len(raw))
        else:
            self.tally.add("differing", len(raw), len(frame.content))
        return frame

    def _difference(
        self, name: str, dtype: str, box: Box, raw: memoryview, digest: str
    ) -> Frame | None:
        tensor, chunk = self._by_place.get((name, box), (None, None))
        if tensor is None or chunk is None or tensor.dtype != dtype or not len(raw):
            return None
        base = self._content(name, tensor, chunk)
        item = ITEM_SIZES[dtype]
        if base is None or not self._pays(raw, base, item):
            return None
        encoded = self._codec.encode(raw, item, base)
        if len(encoded) > (1 - self._policy.min_saving) * len(raw):
            return None
        return Frame(encoded, self._codec.name, digest, chunk.data)

    def _content(
        self, name: str, tensor: TensorMetadata, chunk: ChunkMetadata
    ) -> memoryview | None:
        """What the parent has at this place; `None` if that cannot be read: no reason to fail a save."""
        remembered = self._memory.get(chunk.data.content)
        if remembered is not None:
            return memoryview(remembered)
        stored = memoryview(bytearray(chunk.data.length))
        try:
            self._source.read_range(chunk.data.file, chunk.data.start, stored)
            return self._source.decode(name, tensor, chunk, stored)
        except CheckpointError:
            return None

    def _pays(self, raw: memoryview, base: memoryview, item: int) -> bool:
        """Whether a few stretches of the chunk get smaller by enough; a small chunk is tried as a whole."""
        length = self._policy.sample_bytes // _SAMPLES // item * item
        if len(raw) <= _SAMPLES * length:
            return True
        stored = 0
        for number in range(_SAMPLES):
            start = (len(raw) - length) * number // (_SAMPLES - 1) // item * item
            part = slice(start, start + length)
            stored += len(self._codec.encode(raw[part], item, base[part]))
        return stored <= (1 - self._policy.min_saving) * _SAMPLES * length
