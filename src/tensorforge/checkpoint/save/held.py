"""The memory behind a rank's files: its own tensors, or tensors put together from several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tensorforge.checkpoint.format.file_layout import Segment, plan_file
from tensorforge.checkpoint.model_state import Captured
from tensorforge.checkpoint.save.file_image import Bytes, FileImage
from tensorforge.checkpoint.save.write_plan import FileAssignment
from tensorforge.checkpoint.tensors import DTYPES, byte_view, on_cpu
from tensorforge.errors import InvalidInputError


class HeldMemory:
    """Finds the bytes of pieces of tensors. `incomplete` are those that need parts from other ranks."""

    def __init__(self, captured: Captured, ties: Mapping[str, str]) -> None:
        self._captured = captured
        self._ties = ties
        self.incomplete: dict[str, torch.Tensor] = {}

    def image(self, file: FileAssignment, *, headless: bool = False) -> FileImage:
        """A file whose pieces all lie here."""
        plan = plan_file(file.key, file.pieces, headless=headless, ties=self._ties)
        return FileImage(plan, _remembering([self._local(segment) for segment in plan.segments]))

    def assembled(
        self, file: FileAssignment, scattered: frozenset[str], *, copied: bool
    ) -> FileImage:
        """A file some of whose tensors lie on several ranks: what is here is copied together already.

        With `copied` the other tensors are copied too, so that the originals may change.
        """
        plan = plan_file(file.key, file.pieces, ties=self._ties)
        sources: list[Callable[[], Bytes]] = []
        for segment in plan.segments:
            if segment.name in scattered:
                tensor = self._assemble(segment)
                sources.append(lambda tensor=tensor: byte_view(tensor))  # type: ignore[misc]  # bound early
            elif copied:
                content = self._local(segment)().copy()
                sources.append(lambda content=content: content)  # type: ignore[misc]  # bound early
            else:
                sources.append(self._local(segment))
        return FileImage(plan, _remembering(sources))

    def _assemble(self, segment: Segment) -> torch.Tensor:
        tensor = torch.empty(segment.shape, dtype=DTYPES[segment.dtype])
        held = self._captured.tensors.get(segment.name)
        for box, part in held.parts if held else ():
            tensor[box.slices_in(segment.box)].copy_(part)
        self.incomplete[segment.name] = tensor
        return tensor

    def _local(self, segment: Segment) -> Callable[[], Bytes]:
        for box, tensor in self._captured.tensors[segment.name].parts:
            if box.contains(segment.box):
                part = tensor[segment.box.slices_in(box)] if tensor.ndim else tensor
                return lambda: byte_view(on_cpu(part))
        raise InvalidInputError(f"tensor {segment.name!r}: {segment.box} does not lie here")


def _remembering(sources: list[Callable[[], Bytes]]) -> Callable[[int], Bytes]:
    """Each source's bytes by number, asked for once: a tensor that is not contiguous is copied for it."""
    known: dict[int, Bytes] = {}

    def get(index: int) -> Bytes:
        content = known.get(index)
        if content is None:
            content = known[index] = sources[index]()
        return content

    return get
