"""Loading processes in a cluster that changes: the same weights, and no process left behind."""

import multiprocessing

import psutil
from tests.integration.train_cases import Noisy, data, make_run, train
from torch.nn import functional as F  # noqa: N812

from tensorforge.testing.storms import check_history
from tensorforge.train import Loading

TOTAL = 60


def noisy_run(loading=None):
    return make_run("mlp", dataset=Noisy(data("mlp")), loading=loading)


def work_with_processes():
    with noisy_run(Loading(num_workers=1)) as run:
        for step in run.steps(total=TOTAL):
            if step.number < 2:
                pids = [child.pid for child in multiprocessing.active_children()]
                run._log.write("loading", pids=pids)
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()


def test_a_kill_a_leave_and_a_join_change_no_bit_and_leave_no_process(cluster):
    alone, _ = train(noisy_run(), TOTAL)
    with cluster(main=work_with_processes, arguments=(), workers=3) as running:
        for name in "abc":
            running.start_worker(name)
        running.wait_for_step(10)
        running.kill("b")
        running.wait_for_step(20)
        running.start_worker("d")
        running.wait_for_step(30)
        running.ask_to_leave("a")
        running.wait_for_end()
        ends = {f["digest"] for f in running.finals().values() if f["outcome"] == "complete"}
        assert ends == {alone}, running.describe()
        check_history(running.events(), TOTAL)
        pids = {p for e in running.events() if e["kind"] == "loading" for p in e["pids"]}
        assert len(pids) >= 3
        running.wait_until(lambda: not any(map(psutil.pid_exists, pids)), "no process is left")
