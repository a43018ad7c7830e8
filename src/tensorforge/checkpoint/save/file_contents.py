"""The contents of a file that is about to be written: its layout, and the memory that its bytes come from."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.file_layout import FilePlan, PlacedBox, plan_file
from tensorforge.checkpoint.model_state import CapturedState
from tensorforge.checkpoint.save.write_plan import FileAssignment
from tensorforge.checkpoint.tensors import DTYPES, byte_view, on_cpu
from tensorforge.errors import InvalidInputError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_stop = operator.itemgetter(1)


@dataclass(frozen=True, slots=True)
class PendingChunk:
    """A chunk of a file that is not written yet; `placed` is the number of its box in the file."""

    placed: int
    box: Box
    start: int
    length: int


class FileContents:
    """The bytes of a planned file. They are in tensors until `stage` replaces them by a copy.

    `sources` has a function for each box of the plan that returns the bytes of the box.
    """

    def __init__(self, plan: FilePlan, sources: Sequence[Callable[[], Bytes]]) -> None:
        self.plan = plan
        self._sources = sources
        # A tensor that is not contiguous is copied to get its bytes, so each is asked for them once.
        self._bytes: dict[int, Bytes] = {}
        self._staged: Bytes | None = None
        self._ranges = [(placed.start, placed.stop) for placed in plan.boxes]
        self.chunks: Sequence[PendingChunk] = [
            PendingChunk(index, box, start, length)
            for index, placed in enumerate(plan.boxes)
            for box, start, length in placed.chunks()
        ]

    def box_of(self, chunk: PendingChunk) -> PlacedBox:
        """The box of the file that a chunk is cut from."""
        return self.plan.boxes[chunk.placed]

    def chunk_bytes(self, chunk: PendingChunk) -> Bytes:
        """The bytes of a chunk, not copied."""
        if self._staged is not None:
            return self._staged[chunk.start : chunk.start + chunk.length]
        start = chunk.start - self.box_of(chunk).start
        return self._box_bytes(chunk.placed)[start : start + chunk.length]

    def _box_bytes(self, index: int) -> Bytes:
        content = self._bytes.get(index)
        if content is None:
            content = self._bytes[index] = self._sources[index]()
        return content

    def chunks_beginning_in(self, start: int, stop: int) -> range:
        """The numbers of the chunks whose first byte is in a range of the file."""
        low = bisect.bisect_left(self.chunks, start, key=lambda chunk: chunk.start)
        return range(low, bisect.bisect_left(self.chunks, stop, key=lambda chunk: chunk.start))

    def read(self, start: int, length: int, scratch: Bytes) -> Bytes:
        """Bytes of the file, padded with zeros beyond its end: in the staged copy, or else in `scratch`."""
        if self._staged is not None:
            return self._staged[start : start + length]
        content = min(length, self.plan.size - start)
        self.copy(start, scratch[:content])
        scratch[content:length] = 0
        return scratch[:length]

    def copy(self, start: int, into: Bytes) -> None:
        """Fill a buffer with the bytes of the file from `start` on."""
        stop, header = start + len(into), self.plan.header
        if start < len(header):
            beginning = np.frombuffer(header[start:stop], np.uint8)
            into[: len(beginning)] = beginning
        index = bisect.bisect_right(self._ranges, start, key=_stop)
        while index < len(self._ranges) and self._ranges[index][0] < stop:
            first, last = self._ranges[index]
            low, high = max(start, first), min(stop, last)
            if low < high:
                source = self._box_bytes(index)[low - first : high - first]
                np.copyto(into[low - start : high - start], source)
            index += 1

    def stage(self, memory: Bytes) -> None:
        """Take all bytes from `memory` from now on; the caller has copied the file into it."""
        self._staged = memory


class RankMemory:
    """Finds the bytes of boxes in the tensors of this rank.

    `incomplete` are the tensors that `assembled_contents` allocated and that still lack boxes of other ranks.
    """

    def __init__(self, captured: CapturedState, ties: Mapping[str, str]) -> None:
        self._captured = captured
        self._ties = ties
        self.incomplete: dict[str, torch.Tensor] = {}

    def contents(self, file: FileAssignment, *, headless: bool = False) -> FileContents:
        """The contents of a file whose boxes are all in the memory of this rank. Nothing is copied."""
        plan = plan_file(file.key, file.boxes, headless=headless, ties=self._ties)
        return FileContents(plan, [self._source(placed) for placed in plan.boxes])

    def assembled_contents(
        self, file: FileAssignment, scattered: frozenset[str], *, copied: bool
    ) -> FileContents:
        """The contents of a file with `scattered` tensors, which have boxes on other ranks.

        The local boxes of scattered tensors are copied into new tensors. With `copied`, the other tensors are
        copied too, so that the caller may change the originals.
        """
        plan = plan_file(file.key, file.boxes, ties=self._ties)
        sources: list[Callable[[], Bytes]] = []
        for placed in plan.boxes:
            if placed.name in scattered:
                sources.append(functools.partial(byte_view, self._assemble(placed)))
            elif copied:
                copy = self._source(placed)().copy()
                sources.append(functools.partial(np.asarray, copy))
            else:
                sources.append(self._source(placed))
        return FileContents(plan, sources)

    def _assemble(self, placed: PlacedBox) -> torch.Tensor:
        tensor = torch.empty(placed.shape, dtype=DTYPES[placed.dtype])
        local = self._captured.tensors.get(placed.name)
        for box, elements in local.boxes if local else ():
            tensor[box.slices_in(placed.box)].copy_(elements)
        self.incomplete[placed.name] = tensor
        return tensor

    def _source(self, placed: PlacedBox) -> Callable[[], Bytes]:
        for box, tensor in self._captured.tensors[placed.name].boxes:
            if box.contains(placed.box):
                elements = tensor[placed.box.slices_in(box)] if tensor.ndim else tensor
                return lambda: byte_view(on_cpu(elements))
        raise InvalidInputError(f"tensor {placed.name!r}: {placed.box} is not on this rank")
