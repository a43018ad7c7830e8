"""How a run ends, on real processes: complete only at its goal, handed over or stopped before it."""

import json
import os
import signal
import subprocess
import sys
import time

from tests.faults.endless_training import (
    ENDLESS,
    PATIENT,
    endless_work,
    start_together,
    wait_until_together,
)
from tests.integration.train_cases import make_run
from torch.nn import functional as F  # noqa: N812

from tensorforge.catalog import CheckpointSchedule
from tensorforge.cluster.ended_runs import EXIT_UNFINISHED
from tensorforge.elastic import CoordinatorClient
from tensorforge.train import CheckpointPlan


def status(running):
    with CoordinatorClient(running.address) as client:
        return client.status()


def waiting(running):
    return {worker.id for worker in status(running).waiting}


def test_the_last_member_hands_its_state_over_to_a_joiner_before_it_leaves(cluster):
    # Joiners wait for a long quiet time, so the signal comes while one waits.
    config = PATIENT | {"stability_window_ms": 600_000}
    work = ("mlp", "sgd", {})
    with cluster(main=endless_work, arguments=work, workers=1, config=config) as running:
        start_together(running, "a")
        with CoordinatorClient(running.address) as client:
            client.scale(2)
        running.start_worker("b")
        running.wait_until(lambda: "b" in waiting(running), "b waits")
        before = running.committed_step()
        running.ask_to_leave("a")
        running.wait_until(lambda: "a" in running.finals(), "the end of a")
        wait_until_together(running, "b")
        running.wait_for_step(before + 20)
        assert status(running).ended is None
        assert running.finals()["a"]["outcome"] == "left"
        assert running.exit_codes()["a"] == EXIT_UNFINISHED
        formed = [e for e in running.events() if e["kind"] == "formed" and e["worker"] == "b"]
        assert formed[0]["committed_step"] >= before, "b has the state of a"


def test_the_last_member_that_is_asked_to_leave_stops_the_run_and_says_where(cluster):
    work = ("mlp", "sgd", {})
    with cluster(main=endless_work, arguments=work, workers=1, config=PATIENT) as running:
        start_together(running, "a")
        running.ask_to_leave("a")
        running.wait_for_end()
        ended = status(running).ended
        last = running.finals()["a"]["committed_step"]
        assert ended.outcome == "stopped"
        assert ended.reason == f"stopped at step {last + 1} of {ENDLESS}: SIGTERM"
        assert running.exit_codes() == {"a": EXIT_UNFINISHED}


def work_by_name(goals, rates):
    """Trains as far, and at the rate, that this worker's name stands for."""
    name = os.environ["TENSORFORGE_WORKER_ID"]
    run = make_run("mlp", "sgd")
    for group in run.state.optimizer.param_groups:
        group["lr"] = rates.get(name, 0.1)
    with run:
        for step in run.steps(total=goals.get(name, ENDLESS)):
            time.sleep(0.01)
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()


def test_a_joiner_with_another_goal_or_other_options_is_refused_and_the_others_go_on(cluster):
    work = ({"goal": 200}, {"rate": 0.5})
    with cluster(main=work_by_name, arguments=work, workers=1, config=PATIENT) as running:
        start_together(running, "a")
        for name in ("goal", "rate"):
            running.start_worker(name)
        running.wait_until(lambda: running.living() == {"a"}, "both are refused")
        step = running.committed_step()
        running.wait_for_step(step + 10)
        logs = {n: (running.folder / f"{n}.log").read_text() for n in ("goal", "rate")}
        assert f"goal: 200 steps here, {ENDLESS} steps in the run" in logs["goal"]
        assert "optimizer group 0: " in logs["rate"]
        assert "lr=0.5" in logs["rate"]
        assert status(running).generation == 1
        assert running.exit_codes()["goal"] == running.exit_codes()["rate"] == 1


def saving_work(folder):
    """Trains without a scheduled checkpoint: only the end of the run makes one."""
    plan = CheckpointPlan(location=folder, schedule=CheckpointSchedule(every_steps=ENDLESS))
    with make_run("mlp", "sgd", checkpoints=plan) as run:
        for step in run.steps(total=ENDLESS):
            time.sleep(0.01)
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()


def test_a_run_that_an_operator_ends_saves_an_emergency_checkpoint_first(cluster, tmp_path):
    work = (tmp_path / "checkpoints",)
    with cluster(main=saving_work, arguments=work, workers=2, config=PATIENT) as running:
        start_together(running, "a", "b")
        with CoordinatorClient(running.address) as client:
            client.stop("maintenance")
        running.wait_for_end()
        saver = status(running).ended.saver
        saved = [e for e in running.events() if e["kind"] == "checkpoint" and e["complete"]]
        assert {(e["worker"], e["step"]) for e in saved} == {
            (saver, running.finals()[saver]["committed_step"])
        }
        assert set(running.exit_codes().values()) == {EXIT_UNFINISHED}


SCRIPT = """
import sys, time
import torch
from torch import nn
from tensorforge.train import Run, RunConfig

torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Run(model, optimizer, data, RunConfig(batch_size=8, shards=4)) as run:
    for step in run.steps(total=int(sys.argv[1])):
        time.sleep(0.01)
        for x, y in step.batches():
            step.backward(nn.functional.mse_loss(model(x), y))
        step.commit()
"""


def test_a_launched_run_whose_only_worker_is_stopped_does_not_end_as_a_success(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tensorforge", "run", "--json", "--spares", "0"]
    command += ["--run-dir", str(tmp_path / "run"), str(script), "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        pid = None
        for line in launcher.stdout:
            event = json.loads(line)
            pid = event.get("pid") if event["event"] == "worker_started" else pid
            if event["event"] == "step_committed" and event["step"] == 5:
                os.kill(pid, signal.SIGTERM)
        assert launcher.wait() == EXIT_UNFINISHED
    assert event["event"] == "outcome"
    assert "of 1000000: SIGTERM" in event["reason"]
