"""Many rescales in one process leave nothing behind."""

import gc

import psutil
import pytest
from tests.integration.train_cases import make_run
from torch.nn import functional as F  # noqa: N812

from tensorforge.environment import RESCALES


def wait_for_a_rescale(session):
    with session._condition:  # an urgent one, or a join that was announced instead
        session._condition.wait_for(lambda: session.interrupted or session.drain_requested, 30)


def restless_work(rescales):
    """Reports a broken collective after every step, so that every step has a generation of its own."""
    run, process = make_run("mlp"), psutil.Process()
    with run:
        for step in run.steps(total=rescales + 1):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            if step.commit() and run.rank == 0:
                gc.collect()
                run._log.write(
                    "resources",
                    generation=run.generation,
                    threads=process.num_threads(),
                    descriptors=process.num_fds(),
                    memory=process.memory_info().rss,
                )
                run._membership.suspect(run.generation, "a test")
                wait_for_a_rescale(run._session)


def check(cluster, rescales):
    with cluster(main=restless_work, arguments=(rescales,), workers=2) as running:
        running.start_worker("a")
        running.start_worker("b")
        running.wait_for_end(timeout=60 + rescales)
        assert set(running.exit_codes().values()) == {0}, running.describe()
        seen = [e for e in running.events() if e["kind"] == "resources"]
        assert seen[-1]["generation"] >= rescales
        first, last = seen[len(seen) // 3 : 2 * len(seen) // 3], seen[-len(seen) // 3 :]
        for what, slack in (("threads", 3), ("descriptors", 8), ("memory", 8 << 20)):
            early, late = max(e[what] for e in first), min(e[what] for e in last)
            assert late <= early + slack, f"{what} grew from {early} to {late}"


def test_rescales_leave_no_threads_descriptors_or_memory_behind(cluster):
    check(cluster, 30)


@pytest.mark.soak
def test_two_hundred_rescales_leave_nothing_behind(cluster):
    check(cluster, RESCALES.read())
