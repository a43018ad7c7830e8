"""Whatever an arena does, the bytes of its blocks stay what was written."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tensorforge.errors import CapacityError, DeadlineExceededError
from tensorforge.memory import BlockStatus, TensorArena

CAPACITY = 1 << 14
sizes = st.integers(1, 200) | st.integers(1, CAPACITY // 4)


class ArenaMachine(RuleBasedStateMachine):
    handles = Bundle("handles")
    views = Bundle("views")

    def __init__(self):
        super().__init__()
        self.arena = TensorArena(CAPACITY, alignment=64, small_block=256)
        self.contents = {}  # block id → the byte it is filled with
        self.living = {}  # a view's number → the view and its byte
        self.filled = 0

    def teardown(self):
        self.arena.close()

    def next_byte(self):
        self.filled += 1
        return self.filled % 251

    @rule(target=handles, nbytes=sizes)
    def allocate(self, nbytes):
        try:
            handle = self.arena.allocate(nbytes)
        except CapacityError:
            return multiple()
        self.contents[handle.block_id] = self.next_byte()
        handle.buffer()[:] = bytes([self.contents[handle.block_id]]) * nbytes
        return handle

    @rule(target=handles, nbytes=sizes)
    def acquire(self, nbytes):
        """Takes what is free at once, moving blocks together if that helps."""
        try:
            handle = self.arena.acquire(nbytes, timeout=0)
        except DeadlineExceededError:
            return multiple()
        self.contents[handle.block_id] = self.next_byte()
        handle.buffer()[:] = bytes([self.contents[handle.block_id]]) * nbytes
        return handle

    @rule(target=views, nbytes=sizes, cut=st.integers(0, 3))
    def lend(self, nbytes, cut):
        try:
            tensor = self.arena.lend((nbytes,), torch.uint8)
        except CapacityError:
            return multiple()
        return self.keep(tensor.fill_(self.next_byte())[cut:], self.filled % 251)

    @rule(target=views, handle=handles)
    def view(self, handle):
        if not handle.is_live:
            return multiple()
        return self.keep(handle.tensor(), self.contents[handle.block_id])

    def keep(self, view, byte):
        number = len(self.living) + self.filled * 1000
        while number in self.living:
            number += 1
        self.living[number] = (view, byte, view.data_ptr())
        return number

    @rule(number=consumes(views))
    def drop_view(self, number):
        self.living.pop(number, None)

    @rule(handle=consumes(handles))
    def free(self, handle):
        if handle.is_live:
            handle.free()

    @rule(handle=handles)
    def mark_cached(self, handle):
        if handle.is_live and handle._record.requested_status is BlockStatus.ALLOCATED:
            handle.mark_cached()

    @rule(needed=st.integers(1, CAPACITY))
    def evict(self, needed):
        self.arena.evict(needed)

    @rule()
    def defragment(self):
        moved = self.arena.defragment()
        assert moved >= 0

    @rule(handle=handles)
    def contents_are_what_was_written(self, handle):
        if handle.is_live:
            assert set(handle.buffer()) == {self.contents[handle.block_id]}

    @invariant()
    def living_views_stay_where_and_what_they_are(self):
        for view, byte, address in self.living.values():
            assert view.data_ptr() == address
            assert (view == byte).all()

    @invariant()
    def blocks_cover_the_arena(self):
        cursor = 0
        for block in self.arena.blocks():
            assert block.offset == cursor
            assert block.offset % 64 == 0 or block.status is BlockStatus.FREE
            cursor = block.end
        assert cursor == CAPACITY


ArenaMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)

TestArena = ArenaMachine.TestCase
