"""The sum over all members, along the tree, moving as little as a ring all-reduce does.

Every member has the sums of some nodes. The flat gradient is cut into buckets, and each bucket into one
slice per member. For each bucket, every member sends slice k of each of its nodes to member k (all-to-all).
Member k adds up the tree for slice k. Then the finished slices are gathered on all members (all-gather).
With one node per member this moves as much as a ring all-reduce; with k nodes per member the first half
moves k times as much.

Buckets are sent from the end of the model to its beginning, because a backward pass completes them in this
order. If the gradient is large enough, a thread sends each bucket as soon as it is complete, while the last
backward pass goes on. The order of operations is the same either way, and so it is the same on all members.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorforge.train.gradients.exchange_stream import ExchangeStream, Mark
from tensorforge.train.gradients.flat_layout import Entries, EntryIndex, FlatLayout
from tensorforge.train.gradients.shard_tree import Node, ShardTree
from tensorforge.train.group.fabric import GroupAbortedError, Wait
from tensorforge.train.group.generation_group import GenerationGroup

_SLICE_ALIGNMENT = 16
_IN_FLIGHT = 2
_SLOTS = 4
"""How many buckets use memory at once: those that are being sent and those that are being gathered."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `[start, stop)` of the flat memory of a group; a member's slice has `width` elements.

    `waits_for` are the entries that must be complete before the bucket is sent. The last bucket of a group
    may be padded.
    """

    group: int
    start: int
    stop: int
    width: int
    waits_for: tuple[int, ...]
    dtype: torch.dtype


class TreeReduction:
    """Reduces the steps of one layout. Memory is reused: a result is valid until the next step is reduced."""

    def __init__(self, layout: FlatLayout, tree: ShardTree, bucket_bytes: int) -> None:
        self.layout = layout
        self._tree = tree
        self._bucket_bytes = bucket_bytes
        self.stream = ExchangeStream(layout.device)
        self._buckets: dict[int, list[Bucket]] = {}
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        self._totals: dict[int, list[torch.Tensor]] = {}
        self._send_buffers: dict[int, _SendBuffer] = {}
        size = sum(group.size * group.dtype.itemsize for group in layout.groups)
        self.overlaps = size >= bucket_bytes // 4
        """Whether the gradient is large enough for a thread that sends during the last backward pass."""

    def reduce(
        self,
        group: GenerationGroup | None,
        nodes: Sequence[Sequence[Node]],
        sums: Mapping[Node, Entries],
    ) -> Entries:
        """The values at the root. `nodes` are those of each member, `sums` the values of this member's nodes.

        Raise `GroupAbortedError` if the group breaks; `sums` is left as it was.
        """
        if group is None or group.world_size == 1:
            return sums[self._tree.root]
        return self.begin(group, nodes, sums).finish()

    def begin(
        self,
        group: GenerationGroup,
        nodes: Sequence[Sequence[Node]],
        sums: Mapping[Node, Entries],
        *,
        early: bool = False,
    ) -> Exchange:
        """Start to reduce. `early`: sums are not final yet; call `Exchange.entry_ready` when an entry is."""
        return Exchange(self, group, nodes, [sums[node] for node in nodes[group.rank]], early=early)

    def buckets(self, members: int) -> list[Bucket]:
        """The buckets in the order of sending. Those with buffers come last, because buffers are final last."""
        if members not in self._buckets:
            parameters = set(self.layout.parameter_entries)
            found = [
                b for number in range(len(self.layout.groups)) for b in self._cut(number, members)
            ]
            is_late = {
                b: any((b.group, entry) not in parameters for entry in b.waits_for) for b in found
            }
            self._buckets[members] = sorted(found, key=lambda b: (is_late[b], b.group, -b.start))
        return self._buckets[members]

    def _cut(self, number: int, members: int) -> list[Bucket]:
        group = self.layout.groups[number]
        unit = members * _SLICE_ALIGNMENT
        length = max(1, self._bucket_bytes // group.dtype.itemsize // unit) * unit
        buckets = []
        for start in range(0, group.size, length):
            stop = min(group.size, start + length)
            width = -(-(stop - start) // unit) * _SLICE_ALIGNMENT
            waits_for = tuple(
                entry_number
                for entry_number, entry in enumerate(group.entries)
                if entry.offset < stop and start < entry.offset + max(1, entry.size)
            )
            buckets.append(Bucket(number, start, stop, width, waits_for, group.dtype))
        return buckets

    def fold(self, bucket: Bucket, parts: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """Add up one slice along the tree. The result lies in the memory of one of the parts."""
        add = _add if self.layout.groups[bucket.group].summed else _first
        return self._tree.fold(parts, add)

    def total(self, members: int) -> list[torch.Tensor]:
        """The flat memory of the result, per group."""
        if members not in self._totals:
            self._totals = {members: self._flats(members)}
        return self._totals[members]

    def send_buffer(self, members: int) -> Entries:
        """Entries in flat memory, for the sums of one node: they can be sent without being packed first."""
        if members not in self._send_buffers:
            flats = self._flats(members)
            groups = zip(self.layout.groups, flats, strict=True)
            views = [group.views(flat) for group, flat in groups]
            self._send_buffers = {members: _SendBuffer(flats, views)}
        return self._send_buffers[members].entries

    def packed(self, entries: Entries, members: int) -> list[torch.Tensor] | None:
        """The flat memory of `entries` if they are the send buffer's, otherwise `None`."""
        buffer = self._send_buffers.get(members)
        return buffer.flats if buffer is not None and buffer.entries is entries else None

    def _flats(self, members: int) -> list[torch.Tensor]:
        """One flat memory per group, with space for the padding of the group's last bucket."""
        sizes = [group.size for group in self.layout.groups]
        for bucket in self.buckets(members):
            end = bucket.start + bucket.width * members
            sizes[bucket.group] = max(sizes[bucket.group], end)
        groups, device = zip(sizes, self.layout.groups, strict=True), self.layout.device
        return [torch.zeros(size, dtype=group.dtype, device=device) for size, group in groups]

    def memory(self, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory with arbitrary content. The same purpose gets the same memory again."""
        found = self._memory.get((purpose, dtype.itemsize))
        if found is None or found.numel() < size * dtype.itemsize:
            found = torch.zeros(size * dtype.itemsize, dtype=torch.uint8, device=self.layout.device)
            self._memory[purpose, dtype.itemsize] = found
        return found[: size * dtype.itemsize].view(dtype)

    def forget_memory(self) -> None:
        """Never use the current memory again: gloo may still write into it for operations that were aborted."""
        self._memory.clear()
        self._totals.clear()
        self._send_buffers.clear()


class Exchange:
    """The reduction of one step, under way. Until `finish` returns nothing else may use the group."""

    def __init__(
        self,
        reduction: TreeReduction,
        group: GenerationGroup,
        nodes: Sequence[Sequence[Node]],
        sums: Sequence[Entries],
        *,
        early: bool,
    ) -> None:
        self._reduction = reduction
        self._group = group
        self._nodes = nodes
        self._sums = sums
        self._total = reduction.total(group.world_size)
        self._error: BaseException | None = None
        self._arrival = threading.Condition()
        self._stream = reduction.stream
        self._stream.wait_for(self._stream.mark())
        self._is_complete = not early
        self._completed: Mark = None
        self._ready: dict[EntryIndex, Mark] = {}
        """The entries that are final, each with the point in the device's work from which on it is."""
        self._thread: threading.Thread | None = None
        if early:
            name = f"exchange-{group.generation}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def entry_ready(self, index: EntryIndex) -> None:
        """Note that this entry is final in all sums, after the work of the current stream. Never blocks."""
        mark = self._stream.mark()
        with self._arrival:
            self._ready[index] = mark
            self._arrival.notify()

    def finish(self) -> Entries:
        """Return the result, or raise `GroupAbortedError`. All sums must be final."""
        if self._thread is None:
            self._run()
        else:
            self._join()
        self._stream.join()
        if self._error is not None:
            self._reduction.forget_memory()
            raise self._error
        groups = zip(self._reduction.layout.groups, self._total, strict=True)
        return [group.views(flat) for group, flat in groups]

    def abandon(self) -> None:
        """Give up the step, and the group with it."""
        self._group.abort("a step was given up")
        self._join()
        self._stream.join()
        self._reduction.forget_memory()

    def _join(self) -> None:
        if self._thread is not None:
            mark = self._stream.mark()
            with self._arrival:
                self._is_complete, self._completed = True, mark
                self._arrival.notify()
            self._thread.join()

    def _run(self) -> None:
        """Do all operations on the exchange's stream."""
        try:
            with self._stream.used():
                self._run_in_order()
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            self._error = error

    def _run_in_order(self) -> None:
        """Do all operations, in an order that depends on the layout and the members alone."""
        sent: deque[_Sent] = deque()
        gathers: deque[Wait] = deque()
        for number, bucket in enumerate(self._reduction.buckets(self._group.world_size)):
            self._await_entries(bucket)
            if len(gathers) == _SLOTS - _IN_FLIGHT:
                gathers.popleft()()  # its slot is needed again
            sent.append(self._send(bucket, number % _SLOTS))
            if len(sent) == _IN_FLIGHT:
                gathers.append(self._complete(sent.popleft()))
        gathers.extend(self._complete(each) for each in sent)
        for wait in gathers:
            wait()

    def _await_entries(self, bucket: Bucket) -> None:
        needed = {(bucket.group, entry) for entry in bucket.waits_for}
        with self._arrival:
            while not self._is_complete and not needed <= self._ready.keys():
                self._arrival.wait(_POLL_SECONDS)
                if self._group.is_aborted:
                    raise GroupAbortedError(f"generation {self._group.generation} was aborted")
            marks = [self._ready.get(index, self._completed) for index in needed]
        for mark in marks:
            self._stream.wait_for(mark)

    def _send(self, bucket: Bucket, slot: int) -> _Sent:
        """Start to send each member its slice of each of this member's nodes, one node per turn."""
        width, dtype = bucket.width, bucket.dtype
        counts = [len(nodes) for nodes in self._nodes]
        incoming = self._reduction.memory(f"incoming {slot}", sum(counts) * width, dtype)
        order: list[Node] = []
        waits: list[Wait] = []
        for turn in range(max(counts)):
            sent = [nodes[turn] for nodes in self._nodes if turn < len(nodes)]
            into = incoming[len(order) * width : (len(order) + len(sent)) * width]
            order += sent
            outgoing = torch.empty(0, dtype=dtype, device=incoming.device)
            if turn < len(self._sums):
                outgoing = self._outgoing(bucket, self._sums[turn], f"outgoing {slot} {turn}")
            give = [outgoing.numel() // len(counts)] * len(counts)
            take = [width if turn < count else 0 for count in counts]
            waits.append(self._group.bulk.start_all_to_all(into, outgoing, take, give))
        slices = incoming.view(-1, width).unbind()
        return _Sent(bucket, waits, dict(zip(order, slices, strict=True)))

    def _outgoing(self, bucket: Bucket, sums: Entries, purpose: str) -> torch.Tensor:
        """The bucket's part of `sums` in contiguous memory. Gaps between entries have arbitrary content."""
        members = self._group.world_size
        flats = self._reduction.packed(sums, members)
        if flats is not None:
            return flats[bucket.group][bucket.start : bucket.start + bucket.width * members]
        packed = self._reduction.memory(purpose, bucket.width * members, bucket.dtype)
        entries = self._reduction.layout.groups[bucket.group].entries
        for number in bucket.waits_for:
            entry = entries[number]
            start, stop = (
                max(bucket.start, entry.offset),
                min(bucket.stop, entry.offset + entry.size),
            )
            if start < stop:
                values = sums[bucket.group][number].view(-1)
                packed[start - bucket.start : stop - bucket.start] = values[
                    start - entry.offset : stop - entry.offset
                ]
        return packed

    def _complete(self, sent: _Sent) -> Wait:
        """Add up this member's slice of a bucket and start to gather the slices of all members."""
        for wait in sent.waits:
            wait()
        bucket = sent.bucket
        finished = self._reduction.fold(bucket, sent.parts)
        stop = bucket.start + bucket.width * self._group.world_size
        into = self._total[bucket.group][bucket.start : stop]
        return self._group.bulk.start_all_gather(into, finished)


@dataclass(frozen=True, slots=True)
class _SendBuffer:
    """Flat memory, and the entries in it."""

    flats: list[torch.Tensor]
    entries: Entries


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket that is being sent. After the waits `parts` has this member's slice of every node."""

    bucket: Bucket
    waits: list[Wait]
    parts: dict[Node, torch.Tensor]


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


def _first(left: torch.Tensor, _right: torch.Tensor) -> torch.Tensor:
    return left
