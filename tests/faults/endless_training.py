"""Workers that train until they are told to stop, so that tests wait for events and never for a time."""

import os
import signal
import time

from tests.integration.train_cases import make_run
from torch.nn import functional as F  # noqa: N812

from tensorforge.cluster.ended_runs import EXIT_UNFINISHED
from tensorforge.testing.storms import check_history

ENDLESS = 1_000_000
PATIENT = {"worker_heartbeat_timeout_ms": 30_000}
"""For tests in which no worker falls silent: a busy machine must not look like a silent worker."""


def endless_work(kind, optimizer, settings, pause=0.01):
    """Trains a test model, with a pause in every step so that the logs stay short."""
    with make_run(kind, optimizer, **settings) as run:
        for step in run.steps(total=ENDLESS):
            time.sleep(pause)
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()


def commits(running, *names):
    return [e for e in running.events() if e["kind"] == "commit" and e["worker"] in names]


def newest(running, *names):
    return max((event["step"] for event in commits(running, *names)), default=-1)


def start_together(running, *names):
    """Start these workers, and wait until they train together."""
    for name in names:
        running.start_worker(name)
    wait_until_together(running, *names)


def wait_until_together(running, *names):
    """Until the newest generation that has committed a step consists of exactly these workers."""

    def are_together():
        events = [event for event in running.events() if event["kind"] == "commit"]
        generation = max((event["generation"] for event in events), default=0)
        return {e["worker"] for e in events if e["generation"] == generation} == set(names)

    running.wait_until(are_together, f"{', '.join(names)} train together")


def stop(running, *names):
    """End the run after one step on all these workers; the number of committed steps."""
    os.kill(running.workers[names[0]].pid, signal.SIGUSR2)
    running.wait_for_end()
    finals = running.finals()
    assert set(finals) == set(names), running.describe()
    assert {final["outcome"] for final in finals.values()} == {"stopped"}
    assert set(running.exit_codes().values()) == {EXIT_UNFINISHED}
    assert all("none twice, none missing" in f["proof"] for f in finals.values())
    (total,) = {final["committed_step"] + 1 for final in finals.values()}
    check_history(running.events(), total)
    return total


def stop_and_compare(running, alone, kind, optimizer, *names):
    """End the run; every worker has what an undisturbed run has after as many steps."""
    total = stop(running, *names)
    digests = {final["digest"] for final in running.finals().values()}
    assert digests == {alone(kind, optimizer, total)[0]}
    return total
