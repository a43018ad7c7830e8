import copy
import functools
import gc
import io
import threading
import time

import pytest
import torch

from tensorforge.errors import (
    CapacityError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    InvalidInputError,
    TensorForgeError,
    TransitionError,
)
from tensorforge.memory import BlockStatus, TensorArena
from tensorforge.testing.clock import ManualClock

KIB = 1024


@pytest.fixture
def arena():
    with TensorArena(64 * KIB) as arena:
        yield arena


def used(arena):
    return arena.stats().allocated_bytes


def saved_size(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue())


def test_a_lent_tensor_is_memory_of_the_arena_and_comes_back_by_itself(arena):
    tensor = arena.lend((4, 8), torch.float32)
    tensor.copy_(torch.arange(32.0).reshape(4, 8))
    assert tensor.sum() == 496
    assert tensor.is_contiguous()
    assert used(arena) == 512
    del tensor
    assert used(arena) == 0


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t[1:],
        lambda t: t.view(-1),
        lambda t: t.t(),
        lambda t: t.detach(),
        lambda t: torch.nn.Parameter(t),
        lambda t: t.numpy(),
        lambda t: memoryview(t.numpy()),
        lambda t: t.untyped_storage(),
        lambda t: (t.requires_grad_() * 2).sum().grad_fn,
    ],
)
def test_the_block_is_kept_until_the_last_derived_view_is_gone(arena, derive):
    tensor = arena.lend((4, 8), torch.float32)
    derived = derive(tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    if not hasattr(derived, "next_functions"):
        assert used(arena) == 512
        assert arena.lend((4, 8)).data_ptr() != address
    del derived
    gc.collect()
    assert used(arena) == 0
    assert arena.lend((4, 8)).data_ptr() == address


def test_saving_or_copying_a_lent_tensor_writes_the_tensor_not_the_arena():
    with TensorArena(16 << 20) as arena:
        tensor = arena.lend((100,), torch.float32)
        own = torch.empty(100)
        assert saved_size(tensor) == saved_size(own)
        assert copy.deepcopy(tensor).untyped_storage().nbytes() == 400
        assert tensor.untyped_storage().nbytes() == 400
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(1000)


@pytest.mark.parametrize("alignment", [64, 512, 4096])
def test_every_block_starts_at_an_aligned_address(alignment):
    with TensorArena(1 << 20, alignment=alignment) as arena:
        tensors = [arena.lend((n,), torch.uint8) for n in (1, 100, 5000, 70_000)]
        assert all(tensor.data_ptr() % alignment == 0 for tensor in tensors)


def test_tensors_do_not_overlap(arena):
    tensors = [arena.lend((100,), torch.int64) for _ in range(50)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))


def test_a_tensor_without_elements_takes_no_block(arena):
    assert arena.lend((0, 5)).shape == (0, 5)
    assert used(arena) == 0
    assert arena.lend(()).shape == ()


def test_no_room_is_a_capacity_error_with_the_figures(arena):
    kept = arena.allocate(60 * KIB)
    with pytest.raises(CapacityError, match="out of memory") as caught:
        arena.lend((8 * KIB,), torch.uint8)
    assert (caught.value.requested, caught.value.available) == (8 * KIB, 4 * KIB)
    with pytest.raises(CapacityError, match="can never fit"):
        arena.allocate(65 * KIB)
    kept.free()


def test_a_handle_gives_tensors_and_buffers_over_the_same_bytes(arena):
    block = arena.allocate(100)
    block.buffer()[:4] = b"\x01\x00\x00\x00"
    assert block.tensor(torch.int32, (25,))[0] == 1
    assert block.tensor().shape == (100,)
    assert len(block.buffer()) == 100
    block.free()


def test_a_view_must_fit_its_block(arena):
    with arena.allocate(10) as block:
        with pytest.raises(InvalidInputError, match="not a multiple"):
            block.tensor(torch.float32)
        with pytest.raises(InvalidInputError, match="needs 12 bytes, but block-1 has 10"):
            block.tensor(torch.float32, (3,))
        with pytest.raises(InvalidInputError, match="negative"):
            block.tensor(torch.float32, (-1,))
        assert block.tensor(torch.float32, (2,)).shape == (2,)


def test_freed_twice_is_an_error(arena):
    block = arena.allocate(10)
    block.free()
    with pytest.raises(ClosedError, match="block-1 was freed"):
        block.free()
    assert "freed" in repr(block)


@pytest.mark.parametrize("use", ["tensor", "buffer", "pin", "unpin", "mark_cached"])
def test_use_after_free_is_an_error(arena, use):
    block = arena.allocate(10)
    block.free()
    other = arena.allocate(10)  # takes the same place; the old handle must not reach it
    with pytest.raises(ClosedError, match="block-1 was freed"):
        getattr(block, use)()
    assert not block.is_live
    assert other.is_live


def test_a_handle_of_another_arena_is_refused(arena):
    with TensorArena(KIB) as stranger:
        block = stranger.allocate(10)
        with pytest.raises(InvalidInputError, match="belongs to another arena"):
            arena.free(block)
        block.free()


def test_freeing_under_a_living_view_waits_for_the_view(arena):
    block = arena.allocate(1000)
    tensor = block.tensor()
    tensor.fill_(7)
    block.free()
    assert used(arena) == 1024
    assert arena.stats().pinned_bytes == 1024
    assert (tensor == 7).all()
    del tensor
    assert used(arena) == 0


def test_a_dropped_handle_frees_its_block(arena):
    arena.allocate(1000)
    assert used(arena) == 0
    view = arena.allocate(1000).tensor()
    assert used(arena) == 1024
    del view
    assert used(arena) == 0


def test_as_a_context_manager_a_handle_frees_once(arena):
    with arena.allocate(10) as block:
        assert used(arena) == 512
    assert used(arena) == 0
    with arena.allocate(10) as block:
        block.free()
    assert used(arena) == 0


def test_defragmentation_moves_the_bytes(arena):
    blocks = [arena.allocate(KIB + n) for n in range(20)]
    for n, block in enumerate(blocks):
        block.tensor().fill_(n)
    for block in blocks[::2]:
        block.free()
    kept = dict(enumerate(blocks))
    assert arena.defragment() == 10
    assert arena.stats().fragmentation_ratio == 0.0
    for n in range(1, 20, 2):
        assert (kept[n].tensor() == n).all()
        assert kept[n].tensor().numel() == KIB + n
    assert arena.defragment() == 0


def test_a_block_with_a_living_view_is_not_moved(arena):
    first, second, third = (arena.allocate(KIB) for _ in range(3))
    view = second.tensor()
    third.tensor().fill_(3)
    address = view.data_ptr()
    first.free()
    assert arena.defragment() == 1
    assert second.tensor().data_ptr() == address
    assert third.tensor().data_ptr() < address
    assert (third.tensor() == 3).all()
    del view
    third.free()
    assert arena.defragment() == 1
    assert second.tensor().data_ptr() == address - KIB


def test_cached_blocks_are_evicted_when_room_is_needed(arena):
    clock = ManualClock()
    arena._clock = clock
    first, second = arena.allocate(30 * KIB), arena.allocate(30 * KIB)
    first.mark_cached()
    second.mark_cached()
    clock.advance(1)
    first.tensor()
    block = arena.allocate(30 * KIB)
    assert first.is_live
    with pytest.raises(ClosedError, match="block-2 was evicted"):
        second.tensor()
    assert arena.evict(1) == 30 * KIB
    assert not first.is_live
    block.free()


def test_a_cached_block_with_a_living_view_is_not_evicted(arena):
    block = arena.allocate(60 * KIB)
    view = block.tensor()
    block.mark_cached()
    assert arena.evict(1) == 0
    with pytest.raises(CapacityError):
        arena.allocate(30 * KIB)
    del view
    assert arena.stats().cached_bytes == 60 * KIB
    block.pin()
    assert arena.evict(1) == 0
    block.unpin()
    with pytest.raises(TransitionError):
        block.unpin()
    assert arena.blocks()[0].status is BlockStatus.ALLOCATED


def test_a_pinned_block_stays_pinned_when_its_views_end(arena):
    block = arena.allocate(KIB)
    block.pin()
    view = block.tensor()
    del view
    assert arena.stats().pinned_bytes == KIB
    block.unpin()
    assert arena.stats().pinned_bytes == 0


def waiting_thread(arena, nbytes, timeout=20.0):
    """Start a thread that acquires; answers it and the list its outcome goes to."""
    outcome = []

    def run():
        try:
            outcome.append(arena.acquire(nbytes, timeout))
        except TensorForgeError as error:
            outcome.append(error)

    before = len(arena._waiting)
    thread = threading.Thread(target=run)
    thread.start()
    while len(arena._waiting) == before and thread.is_alive():
        time.sleep(0.001)
    return thread, outcome


def test_acquire_takes_what_is_free_at_once(arena):
    with arena.acquire(KIB, timeout=0) as block:
        assert block.nbytes == KIB


def test_acquire_waits_for_room(arena):
    held = arena.allocate(60 * KIB)
    thread, outcome = waiting_thread(arena, 30 * KIB)
    assert outcome == []
    held.free()
    thread.join()
    assert outcome[0].nbytes == 30 * KIB


def test_acquire_waits_for_the_last_view_of_a_lent_tensor(arena):
    tensor = arena.lend((60 * KIB,), torch.uint8)
    thread, outcome = waiting_thread(arena, 30 * KIB)
    view = tensor[5:]
    del tensor
    assert outcome == []
    del view
    thread.join()
    assert outcome[0].nbytes == 30 * KIB


def test_acquire_gives_up_in_time(arena):
    held = arena.allocate(60 * KIB)
    with pytest.raises(DeadlineExceededError, match="no room for 30720 bytes within"):
        arena.acquire(30 * KIB, timeout=0.01)
    assert not arena._waiting
    with pytest.raises(CapacityError, match="can never fit"):
        arena.acquire(65 * KIB, timeout=100)
    held.free()


def test_those_who_wait_are_served_in_order(arena):
    held = arena.allocate(64 * KIB)
    large, large_outcome = waiting_thread(arena, 60 * KIB)
    small, small_outcome = waiting_thread(arena, 8 * KIB)
    held.free()
    large.join()
    assert small_outcome == []  # room for it came first, but not its turn
    large_outcome.pop().free()
    small.join()
    assert small_outcome[0].nbytes == 8 * KIB


def test_one_who_gives_up_lets_the_next_one_through(arena):
    held = arena.allocate(40 * KIB)
    large, large_outcome = waiting_thread(arena, 60 * KIB, timeout=0.2)
    small, small_outcome = waiting_thread(arena, 8 * KIB)
    large.join()
    small.join()
    assert isinstance(large_outcome[0], DeadlineExceededError)
    assert small_outcome[0].nbytes == 8 * KIB
    held.free()


def test_acquire_moves_blocks_together_when_room_is_in_pieces(arena):
    blocks = [arena.allocate(8 * KIB) for _ in range(8)]
    for n, block in enumerate(blocks):
        block.tensor().fill_(n)
    for block in blocks[::2]:
        block.free()
    with pytest.raises(CapacityError, match="defragment"):
        arena.allocate(32 * KIB)
    with arena.acquire(32 * KIB, timeout=0):
        assert [int(block.tensor()[-1]) for block in blocks[1::2]] == [1, 3, 5, 7]


def test_closing_wakes_those_who_wait(arena):
    held = arena.allocate(60 * KIB)
    thread, outcome = waiting_thread(arena, 30 * KIB)
    arena.close()
    thread.join()
    assert isinstance(outcome[0], ClosedError)
    assert not held.is_live


def test_living_tensors_outlive_their_arena():
    with TensorArena(KIB) as arena:
        tensor = arena.lend((10,))
        tensor.fill_(5.0)
        block = arena.allocate(10)
    arena.close()
    assert (tensor == 5.0).all()
    lend = functools.partial(arena.lend, (1,))
    for use in (arena.stats, arena.defragment, arena.blocks, lend, block.tensor):
        with pytest.raises(ClosedError, match="closed"):
            use()
    del arena, block, lend, use
    gc.collect()
    tensor.add_(1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"capacity": 1.5}, "capacity"),
        ({"capacity": 10, "alignment": 3}, "alignment"),
    ],
)
def test_an_arena_needs_a_size_and_an_alignment(arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        TensorArena(**arguments)


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5])
def test_a_block_needs_a_size(arena, nbytes):
    with pytest.raises(InvalidInputError, match="nbytes"):
        arena.allocate(nbytes)


def test_an_arena_larger_than_the_machine_is_refused():
    with pytest.raises(CapacityError, match="cannot allocate"):
        TensorArena(1 << 60)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
@pytest.mark.parametrize("options", [{"pin_memory": True}, {"device": "cuda"}])
def test_pinned_and_cuda_memory_need_a_gpu(options):
    with pytest.raises(InvalidInputError, match="cannot create an arena on"):
        TensorArena(KIB, **options)


def test_threads_lend_and_drop_without_loss():
    errors = []

    def churn(arena, seed):
        generator = torch.Generator().manual_seed(seed)
        mine = []
        try:
            for _ in range(400):
                length = int(torch.randint(1, 2000, (), generator=generator))
                if len(mine) > 5:
                    mine.pop(0)
                tensor = arena.lend((length,), torch.uint8).fill_(seed)
                mine.append(tensor[: length // 2 + 1])
                assert all((view == seed).all() for view in mine)
        except (TensorForgeError, AssertionError) as error:
            errors.append(error)

    with TensorArena(1 << 20) as arena:
        threads = [threading.Thread(target=churn, args=(arena, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        assert errors == []
        assert used(arena) == 0
        assert arena._records == {}
