import gc
import logging
import threading
import weakref

import pytest
from tests.unit.memory.making import take

from tensorforge.memory.finalizer_lock import FinalizerLock


class Cycle:
    """Dies only by the garbage collector, which may run anywhere."""

    def __init__(self):
        self.itself = self


def test_a_finalizer_inside_the_lock_does_not_wait_for_itself(pool):
    key = take(pool, 100)
    victim = Cycle()
    weakref.finalize(victim, pool.free_later, key)
    del victim
    with pool._lock:
        gc.collect()  # the finalizer runs here, in the thread that holds the lock
        assert pool._table.in_use == 100
    assert pool.stats().allocated_bytes == 0


def test_a_queued_free_happens_when_another_thread_releases_the_lock(pool):
    key = take(pool, 100)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with pool._lock:
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(10)
    pool.free_later(key)
    assert pool._table.in_use == 100
    leave.set()
    holder.join()
    assert pool._table.in_use == 0


def test_a_failing_queued_action_is_logged_and_the_lock_still_works(pool, caplog):
    with caplog.at_level(logging.ERROR):
        pool.free_later("ghost")
    assert "ghost" in caplog.text
    assert pool.stats().allocated_bytes == 0


class Interrupt(BaseException):
    """Stands in for a KeyboardInterrupt."""


def test_an_interrupt_in_a_queued_action_releases_the_lock():
    lock = FinalizerLock()

    def interrupt():
        raise Interrupt

    lock._queue.append(interrupt)
    with pytest.raises(Interrupt), lock:
        pytest.fail("the lock must not be entered")
    with lock:
        pass
