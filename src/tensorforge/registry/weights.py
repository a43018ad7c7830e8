"""A model's weights on disk: which tensors, how large, with which checksum. Needs no torch.

Weights are one safetensors file, or a folder of them (the layout of a sharded model). Only the headers are
read for the shapes; nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorforge.errors import IntegrityError, InvalidInputError, NotFoundError
from tensorforge.registry.domain.models import TensorSpec
from tensorforge.validation import is_whole_number

_MAX_HEADER = 100_000_000
_BLOCK = 1 << 20
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What the files of a model say about themselves."""

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorSpec]
    size_bytes: int
    checksum: str


def describe_weights(path: str | Path, *, progress: Progress | None = None) -> Weights:
    """Read the headers and the checksum of a safetensors file, or of a folder of them.

    `NotFoundError` if there is none, `InvalidInputError` if one is not what it claims to be.
    """
    files = weight_files(path)
    tensors: dict[str, TensorSpec] = {}
    for file in files:
        for name, spec in read_header(file).items():
            if name in tensors:
                raise InvalidInputError(f"{file}: the tensor {name!r} is in another file too")
            tensors[name] = spec
    return Weights(
        path=Path(path),
        files=files,
        tensors=tensors,
        size_bytes=sum(file.stat().st_size for file in files),
        checksum=checksum_of(files, progress=progress),
    )


def weight_files(path: str | Path) -> tuple[Path, ...]:
    """The safetensors files at a path, in order of their names."""
    place = Path(path)
    if place.is_file():
        return (place,)
    found = tuple(sorted(place.glob("*.safetensors"))) if place.is_dir() else ()
    if not found:
        raise NotFoundError(f"{place} is no safetensors file and no folder with some")
    return found


def checksum_of(files: tuple[Path, ...], *, progress: Progress | None = None) -> str:
    """`sha256:` of a file's bytes; of several files, of their names and hashes in order."""
    total, done = sum(file.stat().st_size for file in files), 0
    hashes = []
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
        hashes.append(digest.hexdigest())
    if len(files) == 1:
        return f"sha256:{hashes[0]}"
    listing = "".join(f"{h}  {f.name}\n" for h, f in zip(hashes, files, strict=True))
    return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"


def require_checksum(weights: Weights, expected: str) -> None:
    """Raise `IntegrityError` unless the weights are the ones that were registered."""
    if expected and weights.checksum != expected:
        raise IntegrityError(
            f"{weights.path} is not what was registered: its checksum is {weights.checksum}, "
            f"expected {expected}"
        )


def read_header(file: Path) -> dict[str, TensorSpec]:
    """The tensors that a safetensors file declares, checked against the file's length."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
            raise InvalidInputError(f"{file} is not a safetensors file: it has no header")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{file} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise InvalidInputError(f"{file} is not a safetensors file: its header is no object")
    header.pop("__metadata__", None)
    room = size - 8 - length
    return {name: _spec(file, name, entry, room) for name, entry in header.items()}


def _spec(file: Path, name: str, entry: Any, room: int) -> TensorSpec:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(is_whole_number(size) and size >= 0 for size in (*shape, start, stop))
        bits = _BITS[dtype] * math.prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{file}: the tensor {name[:80]!r} is malformed: {error}"
        ) from error
    if not whole or not start <= stop <= room or (stop - start) * 8 != bits:
        raise InvalidInputError(
            f"{file}: the tensor {name[:80]!r} ({dtype} {list(shape)}) does not fit its bytes "
            f"{start} to {stop} of {room}"
        )
    return TensorSpec(dtype, tuple(shape))
