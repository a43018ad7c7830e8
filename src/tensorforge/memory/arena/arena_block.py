"""The owner's side of a block in an arena."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from tensorforge.errors import ClosedError, InvalidInputError
from tensorforge.memory.pool.blocks import BlockStatus

if TYPE_CHECKING:
    from tensorforge.memory.arena.arena import TensorArena


class BlockRecord:
    """A block as the arena knows it.

    `fate` says why its handle is of no use any more; `wish` is the state its owner wants, which a living
    view overrides: it pins.
    """

    __slots__ = ("block_id", "fate", "nbytes", "view", "views", "wish")

    def __init__(self, block_id: str, nbytes: int) -> None:
        self.block_id = block_id
        self.nbytes = nbytes
        self.fate: str | None = None
        self.view: weakref.ref[torch.UntypedStorage] | None = None
        self.views = 0
        self.wish = BlockStatus.ALLOCATED

    def require_live(self) -> None:
        """Raise a `ClosedError` if the block was freed, lent for good or evicted."""
        if self.fate is not None:
            raise ClosedError(f"{self.block_id} was {self.fate}; its handle is of no use any more")


class ArenaBlock:
    """A handle to a block of an arena. It stays valid when the block is moved.

    After `free`, or when the block was evicted, every use is a `ClosedError` that says so. A handle that is
    dropped frees its block. As a context manager it frees the block at the end.
    """

    __slots__ = ("_arena", "_record")

    def __init__(self, arena: TensorArena, record: BlockRecord) -> None:
        self._arena = arena
        self._record = record

    @property
    def block_id(self) -> str:
        """The block's id: unique in its arena, never used again."""
        return self._record.block_id

    @property
    def nbytes(self) -> int:
        """The bytes asked for."""
        return self._record.nbytes

    @property
    def is_live(self) -> bool:
        """Whether the block can still be used through this handle."""
        return self._record.fate is None

    def tensor(
        self, dtype: torch.dtype = torch.uint8, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor over the block's bytes; without a shape, a flat one over all of them."""
        return self._arena._view(self._record, dtype, shape)  # noqa: SLF001  one unit with its arena

    def buffer(self) -> memoryview:
        """The block's bytes, writable; only on the CPU."""
        if self._arena.device.type != "cpu":
            raise InvalidInputError(f"memory on {self._arena.device} cannot be read as a buffer")
        return self.tensor().numpy().data

    def pin(self) -> None:
        """Keep the block from being moved or evicted, views or not."""
        self._arena._change(self._record, BlockStatus.PINNED)  # noqa: SLF001

    def unpin(self) -> None:
        """Undo `pin`."""
        self._arena._change(self._record, BlockStatus.ALLOCATED)  # noqa: SLF001

    def mark_cached(self) -> None:
        """Let the block be evicted when room is needed and no view is alive; `pin` takes it back."""
        self._arena._change(self._record, BlockStatus.CACHED)  # noqa: SLF001

    def free(self) -> None:
        """Give the block back: at once, or when its last view dies."""
        self._arena.free(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_live:
            self.free()

    def __del__(self) -> None:
        record = getattr(self, "_record", None)
        if record is not None and record.fate is None:
            self._arena._drop_later(record)  # noqa: SLF001

    def __repr__(self) -> str:
        return f"<ArenaBlock {self.block_id}: {self.nbytes} bytes, {self._record.fate or 'live'}>"
