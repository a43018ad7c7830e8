"""A handle to a block in an arena, and the record that it shares with the arena."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch

from tensorforge.errors import ClosedError, InvalidInputError
from tensorforge.memory.pool.blocks import BlockStatus

if TYPE_CHECKING:
    from tensorforge.memory.arena.arena import TensorArena


class BlockRecord:
    """The arena's record of a block.

    `end_reason` says why the handle is no longer valid, `None` while it is. `requested_status` is the
    status that the owner asked for; while a view is alive, the block is pinned instead.
    """

    __slots__ = ("block_id", "end_reason", "nbytes", "requested_status", "view", "views")

    def __init__(self, block_id: str, nbytes: int) -> None:
        self.block_id = block_id
        self.nbytes = nbytes
        self.end_reason: str | None = None
        self.view: weakref.ref[torch.UntypedStorage] | None = None
        self.views = 0
        self.requested_status = BlockStatus.ALLOCATED

    def require_live(self) -> None:
        """Raise a `ClosedError` if the handle is no longer valid."""
        if self.end_reason is not None:
            raise ClosedError(
                f"{self.block_id} was {self.end_reason}; its handle is no longer valid"
            )


class ArenaBlock:
    """A handle to a block of an arena. It stays valid when the block is moved.

    After `free` or an eviction every use is a `ClosedError` that says so. A handle that is garbage-collected
    frees its block. As a context manager it frees the block at the end.
    """

    __slots__ = ("_arena", "_record")

    def __init__(self, arena: TensorArena, record: BlockRecord) -> None:
        self._arena = arena
        self._record = record

    @property
    def block_id(self) -> str:
        """The block's id, unique in its arena and never reused."""
        return self._record.block_id

    @property
    def nbytes(self) -> int:
        """The number of bytes requested."""
        return self._record.nbytes

    @property
    def is_live(self) -> bool:
        """Whether this handle is still valid."""
        return self._record.end_reason is None

    def tensor(
        self, dtype: torch.dtype = torch.uint8, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor over the block's bytes; without a shape, a one-dimensional one over all of them."""
        return self._arena._view(self._record, dtype, shape)  # noqa: SLF001  a handle and its arena are one unit

    def buffer(self) -> memoryview:
        """The block's bytes as a writable buffer; only on the CPU."""
        if self._arena.device.type != "cpu":
            raise InvalidInputError(f"memory on {self._arena.device} cannot be read as a buffer")
        return self.tensor().numpy().data

    def pin(self) -> None:
        """Forbid that the block is moved or evicted, with or without views."""
        self._arena._change(self._record, BlockStatus.PINNED)  # noqa: SLF001

    def unpin(self) -> None:
        """Undo `pin`."""
        self._arena._change(self._record, BlockStatus.ALLOCATED)  # noqa: SLF001

    def mark_cached(self) -> None:
        """Allow the eviction of the block when room is needed and no view is alive; `pin` ends that."""
        self._arena._change(self._record, BlockStatus.CACHED)  # noqa: SLF001

    def free(self) -> None:
        """Free the block: at once, or when its last view is gone."""
        self._arena.free(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self.free()

    def __del__(self) -> None:
        record = getattr(self, "_record", None)
        if record is not None and record.end_reason is None:
            self._arena._drop_later(record)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<ArenaBlock {self.block_id}: {self.nbytes} bytes, {self._record.end_reason or 'live'}>"
