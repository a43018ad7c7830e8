"""Where pieces of tensors lie in a file. Pure.

A file is a safetensors file: eight bytes with the length of a JSON header, the header, then the pieces without
gaps. The header is padded with spaces so that the data begins at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tensorforge.checkpoint.format.boxes import Box, Shape, split
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.checkpoint.save.assignment import Holding
from tensorforge.errors import InvalidInputError

ALIGNMENT = 4096
CHUNK_BYTES = 8 << 20
"""A chunk's size at most: what is verified, and therefore read, as a whole. No more than a block of writing."""

MODEL = "model/"
OPTIMIZER = "optimizer/"
RANDOM = "rng/"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a tensor at its place in a file."""

    name: str
    dtype: str
    shape: Shape
    box: Box
    start: int

    @property
    def length(self) -> int:
        """The piece's size in bytes."""
        return self.box.size * ITEM_SIZES[self.dtype]

    @property
    def stop(self) -> int:
        """One past the piece's last byte in the file."""
        return self.start + self.length

    def chunks(self) -> Iterator[tuple[Box, int, int]]:
        """The chunks of the piece: box, start in the file, length."""
        item = ITEM_SIZES[self.dtype]
        start = self.start
        for box in split(self.box, CHUNK_BYTES // item):
            yield box, start, box.size * item
            start += box.size * item


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file before it is written: its header's bytes and what follows them."""

    key: str
    header: bytes
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """The file's size."""
        return self.segments[-1].stop if self.segments else len(self.header)


def plan_file(
    key: str,
    pieces: Sequence[Holding],
    *,
    headless: bool = False,
    ties: Mapping[str, str] | None = None,
) -> FilePlan:
    """Lay pieces out in one safetensors file, the widest elements first so that all are aligned.

    A `headless` file is only the pieces' bytes. `ties` are other names of tensors, name → name in the
    file; the header mentions those of whole tensors in the way that safetensors does.
    """
    ordered = sorted(pieces, key=lambda p: (-ITEM_SIZES[p.dtype], p.name, p.box))
    header = b"" if headless else _header(ordered, ties or {})
    segments, start = [], len(header)
    for piece in ordered:
        segment = Segment(piece.name, piece.dtype, piece.shape, piece.box, start)
        segments.append(segment)
        start = segment.stop
    return FilePlan(key, header, tuple(segments))


def _header(pieces: Sequence[Holding], ties: Mapping[str, str]) -> bytes:
    whole = {piece.name for piece in pieces if piece.extent == piece.shape}
    tied = {
        name.removeprefix(MODEL): first.removeprefix(MODEL)
        for name, first in sorted(ties.items())
        if first in whole
    }
    entries: dict[str, object] = {"__metadata__": {**tied, "format": "pt"}}
    position = 0
    for piece in pieces:
        name = name_in_file(piece.name, piece.shape, piece.box)
        if name in entries:
            raise InvalidInputError(f"two tensors would be called {name!r} in one file")
        length = piece.box.size * ITEM_SIZES[piece.dtype]
        entries[name] = {
            "dtype": piece.dtype,
            "shape": piece.box.shape,
            "data_offsets": (position, position + length),
        }
        position += length
    text = msgspec.json.encode(entries)
    padding = -(8 + len(text)) % ALIGNMENT
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def name_in_file(name: str, shape: Shape, box: Box) -> str:
    """A model's tensor keeps its own name; a part of one says which part it is."""
    plain = name.removeprefix(MODEL)
    if box == Box.whole(shape):
        return plain
    ranges = ",".join(f"{a}:{b}" for a, b in zip(box.offset, box.stop, strict=True))
    return f"{plain}[{ranges}]"


def shard_key(prefix: str, rank: int, world_size: int, *, compressed: bool) -> str:
    """The file of one rank in the multi-shard layout."""
    return f"{prefix}/rank-{rank:05}-of-{world_size:05}.{_extension(compressed=compressed)}"


def single_key(prefix: str, *, compressed: bool) -> str:
    """The only data file of the single-file layout."""
    return f"{prefix}.{_extension(compressed=compressed)}"


def consolidated_key(prefix: str, kind: str, number: int, total: int, *, compressed: bool) -> str:
    """The file `number` (from 1) of the consolidated layout; `kind` is model or optimizer."""
    return f"{prefix}/{kind}-{number:05}-of-{total:05}.{_extension(compressed=compressed)}"


def index_key(prefix: str) -> str:
    """The consolidated layout's index, by the name that other libraries look for."""
    return f"{prefix}/model.safetensors.index.json"


def index_document(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The consolidated layout's index: which tensor lies in which file."""
    document = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def part_key(prefix: str, rank: int) -> str:
    """Where a rank leaves the pieces that another one has to put together."""
    return f"{prefix}/part-{rank:05}.bin"


def _extension(*, compressed: bool) -> str:
    return "frames" if compressed else "safetensors"
