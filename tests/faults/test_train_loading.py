"""Loading processes in a cluster that changes: the same weights, and no process left behind."""

import multiprocessing
import os
import signal
import time

import psutil
from tests.integration.train_cases import Noisy, data, make_run, train
from torch.nn import functional as F  # noqa: N812

from tensorforge.testing.storms import check_history
from tensorforge.train import Loading

ENDLESS = 1_000_000


def noisy_run(loading=None):
    return make_run("mlp", dataset=Noisy(data("mlp")), loading=loading)


def work_with_processes():
    with noisy_run(Loading(num_workers=1)) as run:
        for step in run.steps(total=ENDLESS):
            pids = [child.pid for child in multiprocessing.active_children()]
            run._log.write("loading", pids=pids)
            time.sleep(0.01)
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()


def test_a_kill_a_leave_and_a_join_change_no_bit_and_leave_no_process(cluster):
    with cluster(main=work_with_processes, arguments=(), workers=3) as running:

        def start(*names):
            for name in names:
                running.start_worker(name)
            running.wait_until(
                lambda: set(names) <= {e["worker"] for e in running.events() if is_commit(e)},
                f"all of {names} train",
            )

        start("a", "b", "c")
        running.kill("b")
        start("d")
        running.ask_to_leave("a")
        running.wait_until(lambda: "a" in running.finals(), "a leaves")
        os.kill(running.workers["c"].pid, signal.SIGUSR2)
        running.wait_for_end()
        finals = {name: running.finals()[name] for name in "cd"}
        (total,) = {final["committed_step"] + 1 for final in finals.values()}
        alone, _ = train(noisy_run(), total)
        assert {final["digest"] for final in finals.values()} == {alone}, running.describe()
        check_history(running.events(), total)
        pids = {p for e in running.events() if e["kind"] == "loading" for p in e["pids"]}
        assert len(pids) == 4
        running.wait_until(lambda: not any(map(psutil.pid_exists, pids)), "no process is left")


def is_commit(event):
    return event["kind"] == "commit"
