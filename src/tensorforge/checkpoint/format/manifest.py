"""The manifest: the JSON document of a checkpoint, which says where every byte of every tensor is stored.

    {"checksum":"xxh3_128:…","body":{…}}

The checksum covers the bytes of the body, and the rest of the document is constant, so that a reader notices
every flipped bit. Reading a manifest executes nothing. `docs/checkpoint-format.md` explains the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from tensorforge.checkpoint.format.boxes import Box, check_partition
from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.errors import CheckpointError, CheckpointErrorType, InvalidInputError
from tensorforge.storage.blobs import Buffer, validate_key

Content = TypeVar("Content")

VERSION = 1
OLDEST_VERSION = 1
SUFFIX = ".metadata.json"
"""The key of a manifest is the checkpoint's prefix and this suffix."""
CHECKSUM = "xxh3_128"
RAW = "raw"

MAX_CHUNK_BYTES = 64 << 20
"""The limit on a chunk, stored and decoded, so that a hostile manifest cannot demand much memory at once."""

_MAX_ELEMENTS = 1 << 60
_MAX_CHAIN = 1000
_CHECKSUM_LENGTH = 32
_HEAD = b'{"checksum":"xxh3_128:'
_MIDDLE = b'","body":'


Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time with a time zone, so that any two can be compared."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of everything in a manifest: an unknown field is an error, a default is left out."""


class FileEntry(_Record, frozen=True):
    """A file with chunks of the checkpoint. Its first `header` bytes have a checksum of their own.

    `owner` is the prefix of the checkpoint that wrote the file, or `None` if that is this checkpoint.
    """

    key: str
    size: int
    header: int = 0
    header_checksum: str = ""
    owner: str | None = None


class StoredBytes(_Record, frozen=True):
    """A range of bytes in a file: its place, its codec, and the checksum of the bytes as they are stored.

    `digest` is the checksum of the decoded bytes; with codec `raw` both are equal and it is left out.
    With a codec that stores a difference, `base` is what the difference was computed from.
    """

    file: int
    start: int
    length: int
    checksum: str
    codec: str = RAW
    digest: str | None = None
    base: StoredBytes | None = None

    @property
    def content(self) -> str:
        """The checksum of the decoded bytes, which is equal for equal content."""
        return self.digest or self.checksum


class ChunkMetadata(_Record, frozen=True):
    """A chunk: a box of a tensor, and where its elements are stored in row-major order."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: StoredBytes

    @property
    def box(self) -> Box:
        """The indices of the chunk's elements."""
        return Box(self.offset, self.shape)


class TensorMetadata(_Record, frozen=True):
    """A tensor's element type, its global shape, and the chunks that together cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkMetadata, ...]

    @property
    def nbytes(self) -> int:
        """The size of the complete tensor in bytes."""
        return Box.full(self.shape).size * ITEM_SIZES[self.dtype]


class ShardData(_Record, frozen=True):
    """The contribution of one rank to a checkpoint: the files that the rank wrote and the chunks in them."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorMetadata]


class CheckpointManifest(_Record, frozen=True, kw_only=True):
    """Everything about a checkpoint except the bytes of its tensors.

    `state` has the trees of the model, the optimizer, the random generators and the caller's extra state, with
    names in place of tensors. `parent` is the prefix of the checkpoint that an incremental one was saved on top
    of.
    """

    version: int
    prefix: str
    save_id: str
    created_at: Moment
    world_size: int
    format: str
    compression: str
    checksum: str
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorMetadata]
    state: dict[str, Any]
    custom_metadata: Any = None
    parent: str | None = None

    @property
    def key(self) -> str:
        """The key under which the manifest is stored."""
        return manifest_key(self.prefix)

    @property
    def size_bytes(self) -> int:
        """The size of the checkpoint's own files."""
        return _own_size(self.files)

    def own_keys(self) -> list[str]:
        """The keys of the files that belong to this checkpoint."""
        return [file.key for file in self.files if file.owner is None]


class ManifestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a manifest that a list of checkpoints needs; its tensors are not decoded."""

    version: int
    prefix: str
    created_at: Moment
    world_size: int
    format: str
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the checkpoint's own files."""
        return _own_size(self.files)


def _own_size(files: tuple[FileEntry, ...]) -> int:
    return sum(file.size for file in files if file.owner is None)


def manifest_key(prefix: str) -> str:
    """The key under which the manifest of the checkpoint `prefix` is stored."""
    return validate_key(f"{prefix}{SUFFIX}")


def checksum(data: Buffer) -> str:
    """The checksum of some bytes, by the algorithm named `CHECKSUM`."""
    return xxhash.xxh3_128_hexdigest(data)


def running_checksum() -> xxhash.xxh3_128:
    """The same checksum for bytes that arrive one buffer at a time: `update`, then `hexdigest`."""
    return xxhash.xxh3_128()


def merge_shards(
    shards: list[ShardData],
) -> tuple[tuple[FileEntry, ...], dict[str, TensorMetadata]]:
    """The files of all ranks in one list, and the tensors of all ranks with chunks that refer to that list.

    `InvalidInputError` if two ranks disagree about a tensor's type or shape.
    """
    files: list[FileEntry] = []
    by_name: dict[str, list[TensorMetadata]] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            by_name.setdefault(name, []).append(renumber_chunks(tensor, len(files).__add__))
        files.extend(shard.files)
    return tuple(files), {name: _merge(name, shards) for name, shards in sorted(by_name.items())}


def renumber_chunks(tensor: TensorMetadata, number: Callable[[int], int]) -> TensorMetadata:
    """The same tensor in a manifest where file `i` of this one is file `number(i)`."""
    chunks = tuple(
        msgspec.structs.replace(chunk, data=renumber(chunk.data, number)) for chunk in tensor.chunks
    )
    return msgspec.structs.replace(tensor, chunks=chunks)


def renumber(stored: StoredBytes, number: Callable[[int], int]) -> StoredBytes:
    """The same bytes, and their bases, in a manifest where file `i` of this one is file `number(i)`."""
    base = None if stored.base is None else renumber(stored.base, number)
    return msgspec.structs.replace(stored, file=number(stored.file), base=base)


def _merge(name: str, shards: list[TensorMetadata]) -> TensorMetadata:
    first = shards[0]
    for shard in shards:
        if (shard.dtype, shard.shape) != (first.dtype, first.shape):
            raise InvalidInputError(
                f"tensor {name!r} is {shard.dtype} {shard.shape} on one rank "
                f"and {first.dtype} {first.shape} on another"
            )
    chunks = sorted((chunk for shard in shards for chunk in shard.chunks), key=lambda c: c.offset)
    return TensorMetadata(first.dtype, first.shape, tuple(chunks))


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The document to store."""
    body = msgspec.json.encode(manifest)
    return _HEAD + checksum(body).encode() + _MIDDLE + body + b"}"


def decode_manifest(document: bytes, key: str) -> CheckpointManifest:
    """Read a stored document; `CheckpointError` if it is damaged, inconsistent or of a newer version."""
    body = _verified_body(document, key)
    _check_version(body, key)
    manifest = _decoded(_decoder, body, key)
    try:
        check_manifest(manifest)
    except InvalidInputError as error:
        raise corrupted(f"{key} is not a valid manifest: {error}", key) from error
    _check_key(manifest.prefix, key)
    return manifest


def summarize_manifest(document: bytes, key: str) -> ManifestSummary:
    """Read the fields of a stored document that a list needs; `CheckpointError` as from `decode_manifest`.

    The checksum of the document is verified. Its tensors are not decoded, which is nearly all of the work.
    """
    body = _verified_body(document, key)
    _check_version(body, key)
    summary = _decoded(_summary_decoder, body, key)
    _check_key(summary.prefix, key)
    return summary


def creation_time(document: bytes, key: str) -> datetime:
    """The `created_at` of a stored document of any version; `CheckpointError` if it is damaged."""
    return _decoded(_time_decoder, _verified_body(document, key), key).created_at


def _decoded(decoder: msgspec.json.Decoder[Content], body: memoryview, key: str) -> Content:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise corrupted(f"{key} is not a valid manifest: {error}", key) from error


def _check_version(body: memoryview, key: str) -> None:
    version = _decoded(_version_decoder, body, key).version
    if not OLDEST_VERSION <= version <= VERSION:
        raise CheckpointError(
            f"{key} has format version {version}; this release reads {OLDEST_VERSION} to {VERSION}",
            key,
            CheckpointErrorType.INCOMPATIBLE_VERSION,
        )


def _check_key(prefix: str, key: str) -> None:
    if f"{prefix}{SUFFIX}" != key:
        raise corrupted(f"{key} is the manifest of another checkpoint, {prefix}", key)


class _AnyVersion(msgspec.Struct):
    version: int


class _Dated(msgspec.Struct):
    created_at: Moment


# Made at import, by one thread: msgspec inspects a type at its first decoding, and that is not thread-safe.
_version_decoder: msgspec.json.Decoder[_AnyVersion] = msgspec.json.Decoder(_AnyVersion)
_time_decoder: msgspec.json.Decoder[_Dated] = msgspec.json.Decoder(_Dated)
_summary_decoder: msgspec.json.Decoder[ManifestSummary] = msgspec.json.Decoder(ManifestSummary)
_decoder: msgspec.json.Decoder[CheckpointManifest] = msgspec.json.Decoder(CheckpointManifest)


def _verified_body(document: bytes, key: str) -> memoryview:
    start = len(_HEAD) + _CHECKSUM_LENGTH + len(_MIDDLE)
    fixed = document[: len(_HEAD)] == _HEAD and document[start - len(_MIDDLE) : start] == _MIDDLE
    if not fixed or document[-1:] != b"}":
        raise corrupted(f"{key} is damaged: it does not have the form of a manifest", key)
    body = memoryview(document)[start:-1]
    if document[len(_HEAD) : len(_HEAD) + _CHECKSUM_LENGTH] != checksum(body).encode():
        raise corrupted(f"{key} is damaged: its checksum does not match", key)
    return body


def corrupted(message: str, path: str) -> CheckpointError:
    """The error for bytes that differ from the ones that were written."""
    return CheckpointError(message, path, CheckpointErrorType.CORRUPTED_CHECKPOINT)


def check_manifest(manifest: CheckpointManifest) -> None:
    """Raise `InvalidInputError` unless every chunk is inside its file and the chunks cover every tensor."""
    if manifest.checksum != CHECKSUM:
        raise InvalidInputError(f"unknown checksum {manifest.checksum!r}")
    if manifest.world_size < 1:
        raise InvalidInputError(f"world size {manifest.world_size} is not positive")
    manifest_key(manifest.prefix)
    for file in manifest.files:
        validate_key(file.key)
        if not 0 <= file.header <= file.size:
            raise InvalidInputError(f"{file.key}: header of {file.header} in {file.size} bytes")
        if file.header and len(file.header_checksum) != _CHECKSUM_LENGTH:
            raise InvalidInputError(f"{file.key}: the header has no checksum")
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, manifest.files)


def _check_tensor(name: str, tensor: TensorMetadata, files: tuple[FileEntry, ...]) -> None:
    if tensor.dtype not in ITEM_SIZES:
        raise InvalidInputError(f"tensor {name!r} has an unknown type {tensor.dtype!r}")
    if any(size < 0 for size in tensor.shape) or Box.full(tensor.shape).size > _MAX_ELEMENTS:
        raise InvalidInputError(f"tensor {name!r} has an impossible shape {tensor.shape}")
    boxes = [chunk.box for chunk in tensor.chunks]
    for box, chunk in zip(boxes, tensor.chunks, strict=True):
        nbytes = box.size * ITEM_SIZES[tensor.dtype]
        if nbytes > MAX_CHUNK_BYTES:
            raise InvalidInputError(f"tensor {name!r} has a chunk of {nbytes} bytes")
        _check_stored(name, chunk.data, nbytes, files)
    check_partition(tensor.shape, boxes, f"tensor {name!r}")


def _check_stored(
    name: str, stored: StoredBytes, nbytes: int, files: tuple[FileEntry, ...]
) -> None:
    link: StoredBytes | None = stored
    for _ in range(_MAX_CHAIN):
        if link is None:
            return
        _check_location(name, link, nbytes, files)
        link = link.base
    raise InvalidInputError(f"tensor {name!r} is a chain of more than {_MAX_CHAIN} differences")


def _check_location(
    name: str, stored: StoredBytes, nbytes: int, files: tuple[FileEntry, ...]
) -> None:
    if not 0 <= stored.file < len(files):
        raise InvalidInputError(f"tensor {name!r} is in file {stored.file} of {len(files)}")
    file = files[stored.file]
    if stored.length < 0 or not file.header <= stored.start <= file.size - stored.length:
        raise InvalidInputError(f"tensor {name!r} is outside of {file.key}")
    if stored.length > MAX_CHUNK_BYTES:
        raise InvalidInputError(
            f"tensor {name!r} has a chunk of {stored.length} bytes in {file.key}"
        )
    if len(stored.checksum) != _CHECKSUM_LENGTH:
        raise InvalidInputError(f"tensor {name!r} has no checksum in {file.key}")
    if stored.codec == RAW and stored.length != nbytes:
        raise InvalidInputError(
            f"tensor {name!r} has {stored.length} bytes in {file.key} and needs {nbytes}"
        )
    if stored.codec != RAW and len(stored.digest or "") != _CHECKSUM_LENGTH:
        raise InvalidInputError(f"tensor {name!r} has no digest in {file.key}")
