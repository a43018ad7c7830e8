"""The sum over all members, along the tree, moving as little as a ring all-reduce does.

Every member holds the sums of some nodes. The flat gradient is cut into buckets and each bucket into one
slice per member; each member sends to each other one that one's slice of its nodes, adds up the whole tree for
its own slice, and the finished slices are gathered. With one node per member this moves what a ring all-reduce
moves; with k nodes the first half costs k times as much.

Buckets go out from the end of the model to its beginning, which is the order in which a backward pass
completes them. If there is enough to send, a thread sends each bucket as soon as it is complete, while the
last backward pass goes on. The order of operations is the same in either case, and so on all members.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorforge.train.gradients.flat_layout import Entries, EntryPlace, Layout
from tensorforge.train.gradients.shard_tree import Node, ShardTree
from tensorforge.train.group.gloo_group import GenerationGroup, GroupAbortedError

_SLICE_ALIGNMENT = 16
_IN_FLIGHT = 2
_SLOTS = 4
"""Buckets whose memory is in use at once: some on their way, some being gathered."""
_LOOK_SECONDS = 0.1

Wait = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements `[start, stop)` of a group's flat memory; `width` of them are each member's slice.

    `waits_for` are the entries that must be complete. The last bucket of a group may be padded.
    """

    group: int
    start: int
    stop: int
    width: int
    waits_for: tuple[int, ...]


class TreeReduction:
    """Reduces steps of one layout. Reuses its memory from step to step: a result holds until the next."""

    def __init__(self, layout: Layout, tree: ShardTree, bucket_bytes: int) -> None:
        self.layout = layout
        self._tree = tree
        self._bucket_bytes = bucket_bytes
        self._buckets: dict[int, list[Bucket]] = {}
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        self._totals: dict[int, list[torch.Tensor]] = {}
        self._rooms: dict[int, _Room] = {}
        size = sum(group.size * group.dtype.itemsize for group in layout.groups)
        self.overlaps = size >= bucket_bytes // 4
        """Whether a thread saves more than it costs; less than that is sent at the end."""

    def reduce(
        self,
        group: GenerationGroup | None,
        nodes: Sequence[Sequence[Node]],
        mine: Mapping[Node, Entries],
    ) -> Entries:
        """The values at the root. `nodes` are each member's, `mine` the values of ours.

        `GroupAbortedError` if the group breaks; `mine` is left as it was.
        """
        if group is None or group.world_size == 1:
            return mine[self._tree.root]
        return self.begin(group, nodes, mine).finish()

    def begin(
        self,
        group: GenerationGroup,
        nodes: Sequence[Sequence[Node]],
        mine: Mapping[Node, Entries],
        *,
        early: bool = False,
    ) -> Exchange:
        """Start to reduce. `early`: sums are still being added up; `Exchange.entry_ready` tells of them."""
        return Exchange(self, group, nodes, [mine[node] for node in nodes[group.rank]], early=early)

    def buckets(self, members: int) -> list[Bucket]:
        """What is sent, in order; those with entries that are complete only at the end come last."""
        if members not in self._buckets:
            parameters = set(self.layout.parameter_places)
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
                place
                for place, entry in enumerate(group.entries)
                if entry.offset < stop and start < entry.offset + max(1, entry.size)
            )
            buckets.append(Bucket(number, start, stop, width, waits_for))
        return buckets

    def dtype(self, bucket: Bucket) -> torch.dtype:
        """Of the bucket's elements."""
        return self.layout.groups[bucket.group].dtype

    def fold(self, bucket: Bucket, parts: Mapping[Node, torch.Tensor]) -> torch.Tensor:
        """The tree's sum of a slice; it lies in one of the parts."""
        add = _add if self.layout.groups[bucket.group].summed else _first
        return self._tree.fold(parts, add)

    def total(self, members: int) -> list[torch.Tensor]:
        """Memory for the result."""
        if members not in self._totals:
            self._totals = {members: self._flats(members)}
        return self._totals[members]

    def room(self, members: int) -> Entries:
        """Memory for the sums of one node: what lies there is sent without being packed first."""
        if members not in self._rooms:
            flats = self._flats(members)
            groups = zip(self.layout.groups, flats, strict=True)
            self._rooms = {members: _Room(flats, [group.views(flat) for group, flat in groups])}
        return self._rooms[members].entries

    def packed(self, entries: Entries, members: int) -> list[torch.Tensor] | None:
        """The flat memory of entries that lie in `room`."""
        room = self._rooms.get(members)
        return room.flats if room is not None and room.entries is entries else None

    def _flats(self, members: int) -> list[torch.Tensor]:
        """A flat memory per group; the last bucket of each has room for its padding."""
        sizes = [group.size for group in self.layout.groups]
        for bucket in self.buckets(members):
            end = bucket.start + bucket.width * members
            sizes[bucket.group] = max(sizes[bucket.group], end)
        groups = zip(sizes, self.layout.groups, strict=True)
        return [torch.zeros(size, dtype=group.dtype) for size, group in groups]

    def memory(self, purpose: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory with anything in it, the same for the same purpose."""
        found = self._memory.get((purpose, dtype.itemsize))
        if found is None or found.numel() < size * dtype.itemsize:
            found = torch.zeros(size * dtype.itemsize, dtype=torch.uint8)
            self._memory[purpose, dtype.itemsize] = found
        return found[: size * dtype.itemsize].view(dtype)

    def forget_memory(self) -> None:
        """gloo may still write into what dead operations hold: never use it again."""
        self._memory.clear()
        self._totals.clear()
        self._rooms.clear()


class Exchange:
    """One step's reduction under way.

    Until `finish` is called the group belongs to the exchange alone.
    """

    def __init__(
        self,
        reduction: TreeReduction,
        group: GenerationGroup,
        nodes: Sequence[Sequence[Node]],
        mine: Sequence[Entries],
        *,
        early: bool,
    ) -> None:
        self._reduction = reduction
        self._group = group
        self._nodes = nodes
        self._mine = mine
        self._total = reduction.total(group.world_size)
        self._error: BaseException | None = None
        self._arrival = threading.Condition()
        self._is_complete = not early
        self._ready: set[EntryPlace] = set()
        self._thread: threading.Thread | None = None
        if early:
            name = f"exchange-{group.generation}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def entry_ready(self, place: EntryPlace) -> None:
        """An entry's sums are complete. Never raises, never blocks."""
        with self._arrival:
            self._ready.add(place)
            self._arrival.notify()

    def finish(self) -> Entries:
        """Everything is complete here: send the rest and return the result, or raise `GroupAbortedError`."""
        if self._thread is None:
            self._run()
        else:
            self._join()
        if self._error is not None:
            self._reduction.forget_memory()
            raise self._error
        groups = zip(self._reduction.layout.groups, self._total, strict=True)
        return [group.views(flat) for group, flat in groups]

    def abandon(self) -> None:
        """The step is given up, and the group with it."""
        self._group.abort("a step was given up")
        self._reduction.forget_memory()
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            with self._arrival:
                self._is_complete = True
                self._arrival.notify()
            self._thread.join()

    def _run(self) -> None:
        """All operations, in an order that depends on the layout and the members alone."""
        try:
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
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            self._error = error

    def _await_entries(self, bucket: Bucket) -> None:
        needed = {(bucket.group, entry) for entry in bucket.waits_for}
        with self._arrival:
            while not self._is_complete and not needed <= self._ready:
                self._arrival.wait(_LOOK_SECONDS)
                if self._group.is_aborted:
                    raise GroupAbortedError(f"generation {self._group.generation} was aborted")

    def _send(self, bucket: Bucket, slot: int) -> _Sent:
        """Send everybody's slice of each of our nodes; what comes is laid node by node, by member."""
        width, dtype = bucket.width, self._reduction.dtype(bucket)
        counts = [len(held) for held in self._nodes]
        incoming = self._reduction.memory(f"incoming {slot}", sum(counts) * width, dtype)
        order: list[Node] = []
        waits: list[Wait] = []
        for turn in range(max(counts)):
            senders = [held[turn] for held in self._nodes if turn < len(held)]
            into = incoming[len(order) * width : (len(order) + len(senders)) * width]
            order += senders
            outgoing = torch.empty(0, dtype=dtype)
            if turn < len(self._mine):
                outgoing = self._outgoing(bucket, self._mine[turn], f"outgoing {slot} {turn}")
            give = [outgoing.numel() // len(counts)] * len(counts)
            take = [width if turn < count else 0 for count in counts]
            waits.append(self._group.start_all_to_all(into, outgoing, take, give))
        slices = incoming.view(-1, width).unbind()
        return _Sent(bucket, waits, dict(zip(order, slices, strict=True)))

    def _outgoing(self, bucket: Bucket, mine: Entries, purpose: str) -> torch.Tensor:
        """The bucket's part of the sums, in one piece. The gaps between entries hold anything."""
        members, dtype = self._group.world_size, self._reduction.dtype(bucket)
        flats = self._reduction.packed(mine, members)
        if flats is not None:
            return flats[bucket.group][bucket.start : bucket.start + bucket.width * members]
        packed = self._reduction.memory(purpose, bucket.width * members, dtype)
        entries = self._reduction.layout.groups[bucket.group].entries
        for number in bucket.waits_for:
            entry = entries[number]
            start, stop = (
                max(bucket.start, entry.offset),
                min(bucket.stop, entry.offset + entry.size),
            )
            if start < stop:
                values = mine[bucket.group][number].view(-1)
                packed[start - bucket.start : stop - bucket.start] = values[
                    start - entry.offset : stop - entry.offset
                ]
        return packed

    def _complete(self, sent: _Sent) -> Wait:
        """Add up our slice of a bucket and start to gather the members' slices."""
        for wait in sent.waits:
            wait()
        bucket = sent.bucket
        finished = self._reduction.fold(bucket, sent.parts)
        stop = bucket.start + bucket.width * self._group.world_size
        into = self._total[bucket.group][bucket.start : stop]
        return self._group.start_all_gather(into, finished)


@dataclass(frozen=True, slots=True)
class _Room:
    """Flat memory, and the entries in it."""

    flats: list[torch.Tensor]
    entries: Entries


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket on its way: `parts` will be our slices of all nodes."""

    bucket: Bucket
    waits: list[Wait]
    parts: dict[Node, torch.Tensor]


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


def _first(left: torch.Tensor, _right: torch.Tensor) -> torch.Tensor:
    return left
