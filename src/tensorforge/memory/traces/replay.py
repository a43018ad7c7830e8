"""Replays a trace through a placement policy, or through a pool of a given size."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorforge.memory.pool.block_table import BlockTable
from tensorforge.memory.pool.blocks import AllocationRequest
from tensorforge.memory.pool.placement_policies import (
    GRANULARITY,
    OFFLINE,
    UNBOUNDED,
    online_policy,
)
from tensorforge.memory.traces.offline_placement import plan_offsets
from tensorforge.memory.traces.trace import AllocationTrace


@dataclass(frozen=True, slots=True)
class Replay:
    """How a policy placed a trace.

    `offsets` is the offset of each block; `reserved` is how many bytes the policy had needed after each
    event.
    """

    policy: str
    trace: str
    peak_live: int
    peak_reserved: int
    offsets: dict[int, int] = field(repr=False)
    reserved: tuple[int, ...] = field(repr=False)

    @property
    def overhead(self) -> float:
        """Peak bytes needed divided by peak bytes in use; 1.0 is the best possible."""
        return self.peak_reserved / self.peak_live if self.peak_live else 1.0

    def position(self, block: int) -> int:
        """The offset of the block in a pool of `peak_reserved` bytes.

        Blocks at the top end of the policy's unbounded space are at the top end of the pool.
        """
        offset = self.offsets[block]
        return offset if offset < UNBOUNDED // 2 else self.peak_reserved - (UNBOUNDED - offset)


@dataclass(frozen=True, slots=True)
class BoundedReplay:
    """How a pool of `capacity` bytes served a trace.

    `failed_at` is the event that found no room, or `None`; compactions moved `moved_bytes`.
    """

    capacity: int
    failed_at: int | None
    reason: str | None
    compactions: int
    moved_bytes: int
    allocated_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every allocation found room."""
        return self.failed_at is None


def replay_trace(trace: AllocationTrace, policy: str) -> Replay:
    """Replay a trace through a policy with an unbounded address space."""
    if policy == OFFLINE:
        return _replay_offline(trace)
    placer = online_policy(policy)
    where: dict[int, int] = {}
    reserved: list[int] = []
    for event in trace.events:
        if event.size > 0:
            where[event.block] = placer.allocate(event.size)
        else:
            placer.free(where[event.block], -event.size)
        reserved.append(placer.reserved)
    return Replay(policy, trace.name, trace.peak_live, placer.reserved, where, tuple(reserved))


def replay_bounded(
    trace: AllocationTrace,
    capacity: int,
    *,
    small_block: int = 0,
    compact: bool = False,
    alignment: int = GRANULARITY,
) -> BoundedReplay:
    """Replay a trace through a `BlockTable` of `capacity` bytes, up to the first failure.

    With `compact`, a request without room is tried again after blocks were moved to make room.
    """
    table = BlockTable(capacity, small_block=small_block)
    blocks: dict[int, str] = {}
    compactions = moved = allocated = 0
    for index, event in enumerate(trace.events):
        if event.size < 0:
            table.free(blocks.pop(event.block))
            continue
        request = AllocationRequest(event.label, event.size, alignment)
        result = table.allocate(request, event.time)
        if not result.success and compact:
            moves = table.plan_room(event.size, alignment)
            table.apply(moves)
            compactions += 1
            moved += sum(move.size for move in moves)
            result = table.allocate(request, event.time)
        if result.block_id is None:
            return BoundedReplay(capacity, index, result.error, compactions, moved, allocated)
        allocated += event.size
        blocks[event.block] = result.block_id
    return BoundedReplay(capacity, None, None, compactions, moved, allocated)


def _replay_offline(trace: AllocationTrace) -> Replay:
    offsets, needed = plan_offsets(trace.lifetimes(), granularity=GRANULARITY)
    reserved, highest = [], 0
    for event in trace.events:
        if event.size > 0:
            highest = max(highest, offsets[event.block] + event.size)
        reserved.append(highest)
    return Replay(OFFLINE, trace.name, trace.peak_live, needed, offsets, tuple(reserved))
