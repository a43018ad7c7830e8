"""The layout of data files: where each box of a tensor is in its file, and how files are named.

A data file is a safetensors file: eight bytes with the length of a JSON header, the header, then the boxes
without gaps. The header is padded with spaces so that the data begins at a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tensorforge.checkpoint.format.boxes import Box, Shape, TensorBox, split
from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.errors import InvalidInputError

ALIGNMENT = 4096
CHUNK_BYTES = 8 << 20
"""The maximum size of a chunk, which is read and verified as a unit. Must not exceed a block of writing."""

MODEL = "model/"
OPTIMIZER = "optimizer/"
RANDOM = "rng/"
EXTRA = "extra/"


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box of a tensor and the position of its first byte in a file."""

    name: str
    dtype: str
    shape: Shape
    box: Box
    start: int

    @property
    def length(self) -> int:
        """The size of the box in bytes."""
        return self.box.size * ITEM_SIZES[self.dtype]

    @property
    def stop(self) -> int:
        """The position after the last byte of the box in the file."""
        return self.start + self.length

    def chunks(self) -> Iterator[tuple[Box, int, int]]:
        """The chunks that the box is stored in: box, start in the file, length."""
        item = ITEM_SIZES[self.dtype]
        start = self.start
        for box in split(self.box, CHUNK_BYTES // item):
            yield box, start, box.size * item
            start += box.size * item


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The layout of one file: the bytes of its header, and the boxes that follow in order."""

    key: str
    header: bytes
    boxes: tuple[PlacedBox, ...]

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self.boxes[-1].stop if self.boxes else len(self.header)


def plan_file(
    key: str,
    boxes: Sequence[TensorBox],
    *,
    headless: bool = False,
    ties: Mapping[str, str] | None = None,
) -> FilePlan:
    """Lay boxes out in one safetensors file, those with the widest elements first so that all are aligned.

    A `headless` file has only the bytes of the boxes. `ties` maps further names of tensors to their names
    in the file; the header lists those of complete tensors in its metadata, as safetensors does.
    """
    ordered = sorted(boxes, key=lambda b: (-ITEM_SIZES[b.dtype], b.name, b.box))
    header = b"" if headless else _header(ordered, ties or {})
    placed, start = [], len(header)
    for each in ordered:
        placed.append(PlacedBox(each.name, each.dtype, each.shape, each.box, start))
        start = placed[-1].stop
    return FilePlan(key, header, tuple(placed))


def _header(boxes: Sequence[TensorBox], ties: Mapping[str, str]) -> bytes:
    complete = {each.name for each in boxes if each.is_complete}
    tied = {
        name.removeprefix(MODEL): first.removeprefix(MODEL)
        for name, first in sorted(ties.items())
        if first in complete
    }
    entries: dict[str, object] = {"__metadata__": {**tied, "format": "pt"}}
    position = 0
    for each in boxes:
        name = name_in_file(each)
        if name in entries:
            raise InvalidInputError(f"two tensors would be called {name!r} in one file")
        entries[name] = {
            "dtype": each.dtype,
            "shape": each.extent,
            "data_offsets": (position, position + each.nbytes),
        }
        position += each.nbytes
    text = msgspec.json.encode(entries)
    padding = -(8 + len(text)) % ALIGNMENT
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def name_in_file(box: TensorBox) -> str:
    """The name of a box in a file's header: the model's own name, with the index ranges if incomplete."""
    plain = box.name.removeprefix(MODEL)
    if box.is_complete:
        return plain
    ranges = ",".join(f"{a}:{b}" for a, b in zip(box.offset, box.box.stop, strict=True))
    return f"{plain}[{ranges}]"


def shard_key(prefix: str, rank: int, world_size: int, *, compressed: bool) -> str:
    """The file of one rank in the multi-shard layout."""
    return f"{prefix}/rank-{rank:05}-of-{world_size:05}.{_extension(compressed=compressed)}"


def single_key(prefix: str, *, compressed: bool) -> str:
    """The only data file of the single-file layout."""
    return f"{prefix}.{_extension(compressed=compressed)}"


def consolidated_key(prefix: str, kind: str, number: int, total: int, *, compressed: bool) -> str:
    """File `number` (from 1) of the consolidated layout; `kind` is model or optimizer."""
    return f"{prefix}/{kind}-{number:05}-of-{total:05}.{_extension(compressed=compressed)}"


def index_key(prefix: str) -> str:
    """The index of the consolidated layout, under the name that Hugging Face libraries look for."""
    return f"{prefix}/model.safetensors.index.json"


def index_document(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The content of that index: tensor name → file name."""
    document = {
        "metadata": {"total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def exchange_key(prefix: str, rank: int) -> str:
    """The temporary file in which a rank leaves boxes for other ranks to write."""
    return f"{prefix}/part-{rank:05}.bin"


def _extension(*, compressed: bool) -> str:
    return "frames" if compressed else "safetensors"
