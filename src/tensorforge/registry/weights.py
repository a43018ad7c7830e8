"""A model's weights on disk: their tensors, size and checksum. Needs no torch.

Weights are one safetensors file, or a folder of them (the layout of a sharded model). The tensors are read from
the headers of the files; nothing in the files is executed.
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
"""A function that is called with the number of bytes or steps done, and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The files of a model, the tensors in them, their total size and their checksum."""

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorSpec]
    size_bytes: int
    checksum: str


def describe_weights(path: str | Path, *, progress: Progress | None = None) -> Weights:
    """Read the headers of a safetensors file or of a folder of them, and compute the checksum.

    `NotFoundError` if there is no such file, `InvalidInputError` if one is malformed or a tensor occurs twice.
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
    """The safetensors files at a path, sorted by name; `NotFoundError` if there are none."""
    location = Path(path)
    if location.is_file():
        return (location,)
    found = tuple(sorted(location.glob("*.safetensors"))) if location.is_dir() else ()
    if not found:
        raise NotFoundError(f"{location} is no safetensors file and no folder that has some")
    return found


def checksum_of(files: tuple[Path, ...], *, progress: Progress | None = None) -> str:
    """`sha256:` and the hash of the file; of several files, the hash of the list of their hashes and names."""
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
    """`IntegrityError` unless the weights have the expected checksum; an empty one is not compared."""
    if expected and weights.checksum != expected:
        raise IntegrityError(
            f"{weights.path} has other weights than those that were registered: its checksum is "
            f"{weights.checksum}, expected {expected}"
        )


def read_header(file: Path) -> dict[str, TensorSpec]:
    """The tensors in the header of a safetensors file; `InvalidInputError` if they do not fit its length."""
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
