import contextlib
import threading

import pytest

from tensorforge.checkpoint.parallel import (
    BackgroundWork,
    ByteCounter,
    CancelledError,
    Deadline,
    run_parallel,
)
from tensorforge.errors import DeadlineExceededError


def test_a_deadline_ends_with_its_time_or_when_it_is_cancelled():
    now, cancel = [0.0], threading.Event()
    deadline = Deadline(5, cancel, clock=lambda: now[0])
    deadline.check("saving")
    assert deadline.remaining == 5
    now[0] = 6.0
    with pytest.raises(DeadlineExceededError, match="saving took longer than 5 seconds"):
        deadline.check("saving")
    assert 0 < deadline.remaining < 1
    cancel.set()
    with pytest.raises(CancelledError, match="saving was cancelled"):
        deadline.check("saving")


def test_every_task_runs_once_and_each_thread_has_one_context():
    done, contexts = [], []

    @contextlib.contextmanager
    def context():
        contexts.append(threading.get_ident())
        yield threading.get_ident()

    tasks = [lambda ident, n=n: done.append((n, ident)) for n in range(50)]
    run_parallel(tasks, context, workers=3, deadline=Deadline(60), what="work")
    assert sorted(n for n, _ in done) == list(range(50))
    assert len(contexts) == 3
    assert {ident for _, ident in done} <= set(contexts)


def test_the_first_error_ends_all_tasks_and_is_raised():
    begun = []

    def task(_):
        begun.append(1)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        run_parallel(
            [task] * 100, contextlib.nullcontext, workers=1, deadline=Deadline(60), what="work"
        )
    assert len(begun) == 1


def test_a_task_that_hangs_does_not_delay_a_cancellation():
    cancel, release = threading.Event(), threading.Event()

    def task(_):
        cancel.set()
        release.wait()

    with pytest.raises(CancelledError):
        run_parallel(
            [task], contextlib.nullcontext, workers=1, deadline=Deadline(60, cancel), what="work"
        )
    release.set()


def test_bytes_are_counted_up_to_the_total():
    calls = []
    counter = ByteCounter(10, lambda done, total: calls.append((done, total)))
    for count in (4, 4, 4):
        counter.add(count)
    assert calls == [(4, 10), (8, 10), (10, 10)]


def test_a_result_in_the_background_is_waited_for():
    release = threading.Event()
    work = BackgroundWork("work", lambda: release.wait() and "done")
    assert not work.is_done
    with pytest.raises(TimeoutError, match="work is still running"):
        work.result(timeout=0.01)
    release.set()
    assert work.result() == "done"
    assert work.is_done
    work.settle()


def test_an_error_in_the_background_is_raised_by_settle_unless_result_raised_it():
    def fail():
        raise ValueError("no")

    unseen, seen = BackgroundWork("work", fail), BackgroundWork("work", fail)
    with pytest.raises(ValueError, match="no"):
        unseen.settle()
    with pytest.raises(ValueError, match="no"):
        seen.result()
    seen.settle()
