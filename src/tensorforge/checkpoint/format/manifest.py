"""What a checkpoint is: one JSON document that says where every byte of every tensor lies.

    {"checksum":"xxh3_128:…","body":{…}}

The checksum covers the body's bytes as they stand, and the rest of the document is fixed, so that no
flipped bit goes unnoticed. Nothing in it is ever executed. `docs/checkpoint-format.md` explains the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from tensorforge.checkpoint.format.boxes import Box, check_partition
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.errors import CheckpointError, CheckpointErrorType, InvalidInputError
from tensorforge.storage.blobs import Buffer, validate_key

Part = TypeVar("Part")

VERSION = 1
OLDEST_VERSION = 1
SUFFIX = ".metadata.json"
CHECKSUM = "xxh3_128"
RAW = "raw"

MAX_CHUNK_BYTES = 64 << 20
"""No chunk is stored in more or decodes to more: a hostile manifest cannot ask for much memory at once."""

_MAX_ELEMENTS = 1 << 60
_MAX_CHAIN = 1000
_CHECKSUM_LENGTH = 32
_HEAD = b'{"checksum":"xxh3_128:'
_MIDDLE = b'","body":'


Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""With a time zone: others cannot be compared."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Strict: an unknown field is an error."""


class FileEntry(_Record, frozen=True):
    """A file of the checkpoint. The bytes before the first chunk are its header, with a checksum of their own.

    `owner` is the prefix of the checkpoint that the file belongs to, if it is not this one.
    """

    key: str
    size: int
    header: int = 0
    header_checksum: str = ""
    owner: str | None = None


class StoredBytes(_Record, frozen=True):
    """Bytes in a file: where, how encoded, and the checksum of what lies there.

    `digest` is the checksum of the decoded bytes (left out for `raw`, where both are one); `base` says what
    a difference was taken from.
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
        """The checksum of the decoded bytes: equal for equal content."""
        return self.digest or self.checksum


class ChunkMetadata(_Record, frozen=True):
    """A box of a tensor and the bytes that hold its elements in row-major order."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    data: StoredBytes

    @property
    def box(self) -> Box:
        """The indices that the chunk holds."""
        return Box(self.offset, self.shape)


class TensorMetadata(_Record, frozen=True):
    """A tensor's type, its whole shape, and the chunks that add up to it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[ChunkMetadata, ...]

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return Box.whole(self.shape).size * ITEM_SIZES[self.dtype]


class ShardData(_Record, frozen=True):
    """What one rank contributes to a checkpoint: the files that it wrote and the chunks in them."""

    rank: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorMetadata]


class CheckpointManifest(_Record, frozen=True, kw_only=True):
    """Everything about a checkpoint except its tensors' bytes."""

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
        """Where the manifest itself is stored."""
        return manifest_key(self.prefix)

    @property
    def size_bytes(self) -> int:
        """The size of the checkpoint's own files."""
        return _own_size(self.files)

    def own_keys(self) -> list[str]:
        """The keys of the files that belong to this checkpoint."""
        return [file.key for file in self.files if file.owner is None]


class ManifestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a checkpoint without looking at its tensors."""

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
    """Where the manifest of the checkpoint called `prefix` is stored."""
    return validate_key(f"{prefix}{SUFFIX}")


def checksum(data: Buffer) -> str:
    """The checksum that this version uses, of any bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def running_checksum() -> xxhash.xxh3_128:
    """The same checksum of bytes that come in pieces: `update`, then `hexdigest`."""
    return xxhash.xxh3_128()


def merge_shards(
    shards: list[ShardData],
) -> tuple[tuple[FileEntry, ...], dict[str, TensorMetadata]]:
    """The files and the tensors of all ranks together; each chunk's file number is moved along."""
    files: list[FileEntry] = []
    pieces: dict[str, list[TensorMetadata]] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            moved = tuple(_move(chunk, len(files)) for chunk in tensor.chunks)
            pieces.setdefault(name, []).append(msgspec.structs.replace(tensor, chunks=moved))
        files.extend(shard.files)
    return tuple(files), {name: _join(name, parts) for name, parts in sorted(pieces.items())}


def _move(chunk: ChunkMetadata, by: int) -> ChunkMetadata:
    data = renumber(chunk.data, lambda file: file + by)
    return msgspec.structs.replace(chunk, data=data)


def renumber(stored: StoredBytes, number: Callable[[int], int]) -> StoredBytes:
    """The same bytes in a manifest that lists its files in another order, bases included."""
    base = None if stored.base is None else renumber(stored.base, number)
    return msgspec.structs.replace(stored, file=number(stored.file), base=base)


def _join(name: str, parts: list[TensorMetadata]) -> TensorMetadata:
    first = parts[0]
    for part in parts:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise InvalidInputError(
                f"tensor {name!r} is {part.dtype} {part.shape} on one rank "
                f"and {first.dtype} {first.shape} on another"
            )
    chunks = sorted((chunk for part in parts for chunk in part.chunks), key=lambda c: c.offset)
    return TensorMetadata(first.dtype, first.shape, tuple(chunks))


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The document that is stored."""
    body = msgspec.json.encode(manifest)
    return _HEAD + checksum(body).encode() + _MIDDLE + body + b"}"


def decode_manifest(document: bytes, key: str) -> CheckpointManifest:
    """Read a stored document; `CheckpointError` if it is damaged, makes no sense or is from the future."""
    body = _verified_body(document, key)
    _check_version(body, key)
    manifest = _decoded(_decoder, body, key)
    try:
        check_manifest(manifest)
    except InvalidInputError as error:
        raise corrupted(f"{key} is not a valid manifest: {error}", key) from error
    _check_place(manifest.prefix, key)
    return manifest


def summarize_manifest(document: bytes, key: str) -> ManifestSummary:
    """Read as much of a stored document as a list needs; `CheckpointError` as from `decode_manifest`.

    The checksum covers all of it, but what it says about tensors is not looked at: that is nearly all the work.
    """
    body = _verified_body(document, key)
    _check_version(body, key)
    summary = _decoded(_summary_decoder, body, key)
    _check_place(summary.prefix, key)
    return summary


def moment_of(document: bytes, key: str) -> datetime:
    """When the checkpoint of a stored document of any version was made; `CheckpointError` if it is damaged."""
    return _decoded(_moment_decoder, _verified_body(document, key), key).created_at


def _decoded(decoder: msgspec.json.Decoder[Part], body: memoryview, key: str) -> Part:
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


def _check_place(prefix: str, key: str) -> None:
    if f"{prefix}{SUFFIX}" != key:
        raise corrupted(f"{key} is the manifest of another checkpoint, {prefix}", key)


class _AnyVersion(msgspec.Struct):
    version: int


class _Dated(msgspec.Struct):
    created_at: Moment


# Made at import, by one thread: msgspec inspects a type when it is first decoded, and not safely.
_version_decoder: msgspec.json.Decoder[_AnyVersion] = msgspec.json.Decoder(_AnyVersion)
_moment_decoder: msgspec.json.Decoder[_Dated] = msgspec.json.Decoder(_Dated)
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
    """The error for bytes that are not the ones that were written."""
    return CheckpointError(message, path, CheckpointErrorType.CORRUPTED_CHECKPOINT)


def check_manifest(manifest: CheckpointManifest) -> None:
    """Raise `InvalidInputError` unless every reference is within bounds and every tensor is complete."""
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
    if any(size < 0 for size in tensor.shape) or Box.whole(tensor.shape).size > _MAX_ELEMENTS:
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
        raise InvalidInputError(f"tensor {name!r} lies in file {stored.file} of {len(files)}")
    file = files[stored.file]
    if stored.length < 0 or not file.header <= stored.start <= file.size - stored.length:
        raise InvalidInputError(f"tensor {name!r} lies outside of {file.key}")
    if stored.length > MAX_CHUNK_BYTES:
        raise InvalidInputError(f"tensor {name!r} has {stored.length} bytes at once in {file.key}")
    if len(stored.checksum) != _CHECKSUM_LENGTH:
        raise InvalidInputError(f"tensor {name!r} has no checksum in {file.key}")
    if stored.codec == RAW and stored.length != nbytes:
        raise InvalidInputError(
            f"tensor {name!r} has {stored.length} bytes in {file.key} and needs {nbytes}"
        )
    if stored.codec != RAW and len(stored.digest or "") != _CHECKSUM_LENGTH:
        raise InvalidInputError(f"tensor {name!r} has no digest in {file.key}")
