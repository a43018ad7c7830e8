"""One change at a time, on real processes: what the survivors do, and what they do not have to do again."""

import os
import signal
import time

import pytest
import torch
from tests.faults.endless_training import (
    ENDLESS,
    PATIENT,
    commits,
    endless_work,
    start_together,
    stop,
    stop_and_compare,
    wait_until_together,
)
from tests.integration.train_cases import make_run, train
from torch.nn import functional as F  # noqa: N812

from tensorforge.catalog import CheckpointSchedule
from tensorforge.cluster.elastic_config import AdaptationStrategy
from tensorforge.cluster.ended_runs import EXIT_UNFINISHED
from tensorforge.train import CheckpointPlan


def digests(running):
    return {f["digest"] for f in running.finals().values() if f["outcome"] == "complete"}


def start(running, *names):
    for name in names:
        running.start_worker(name)


def work_with_a_stuck_worker(victim):
    """Trains the test model; the victim stops for ever in the middle of the first step of all three."""
    is_victim = os.environ["TENSORFORGE_WORKER_ID"] == victim
    run = make_run("mlp")
    with run:
        for step in run.steps(total=ENDLESS):
            computed = 0
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
                computed += 1
                if is_victim and run.world_size == 3:
                    run._log.write("stuck", step=step.number)
                    signal.pause()
            run._log.write("attempt", step=step.number, computed=computed)
            step.commit()


def test_survivors_compute_only_the_lost_shards_again(cluster, alone):
    with cluster(
        main=work_with_a_stuck_worker, arguments=("b",), workers=3, config=PATIENT
    ) as running:
        start(running, "a", "b", "c")

        def attempts():
            """What a and c computed of the step in which b is stuck."""
            events = running.events()
            steps = {e["step"] for e in events if e["kind"] == "stuck"}
            return [e["computed"] for e in events if e["kind"] == "attempt" and e["step"] in steps]

        running.wait_until(lambda: len(attempts()) == 2, "a and c wait for b")
        assert attempts() == [4, 4]
        running.kill("b")
        wait_until_together(running, "a", "c")
        assert sum(attempts()) == 12
        stop_and_compare(running, alone, "mlp", "adamw", "a", "c")


def test_training_goes_on_while_the_coordinator_is_away(cluster, alone):
    with cluster(
        main=endless_work, arguments=("mlp", "sgd", {}), workers=2, config=PATIENT
    ) as running:
        start_together(running, "a", "b")
        running.kill_coordinator()
        away = running.committed_step()
        running.wait_for_step(away + 60)
        since = [event for event in commits(running, "a", "b") if event["step"] >= away]
        assert len({event["generation"] for event in since}) == 1
        running.start_coordinator()
        stop_and_compare(running, alone, "mlp", "sgd", "a", "b")


def test_a_failure_without_a_coordinator_is_survived_once_it_is_back(cluster, alone):
    with cluster(
        main=endless_work, arguments=("mlp", "sgd", {}), workers=3, config=PATIENT
    ) as running:
        start_together(running, "a", "b", "c")

        def broken_groups(name):
            return (running.folder / f"{name}.log").read_text().count(" broke: ")

        before = {name: broken_groups(name) for name in "ab"}
        running.kill_coordinator()
        running.kill("c")
        running.wait_until(
            lambda: all(broken_groups(name) > before[name] for name in "ab"), "a and b notice"
        )
        # Nobody can decide who is left, so nobody commits: that would be a minority's doing.
        stuck = running.committed_step()
        time.sleep(0.5)
        assert running.committed_step() == stuck
        running.start_coordinator()
        wait_until_together(running, "a", "b")
        stop_and_compare(running, alone, "mlp", "sgd", "a", "b")


def test_a_frozen_worker_is_left_behind_and_healed_when_it_is_back(cluster, alone):
    work = ("transformer", "adamw", {}, 0.1)
    with cluster(main=endless_work, arguments=work, workers=3) as running:
        start_together(running, "a", "b", "c")
        running.freeze("b")
        wait_until_together(running, "a", "c")
        running.wait_for_step(running.committed_step() + 15)
        running.thaw("b")
        wait_until_together(running, "a", "b", "c")
        healed = [e for e in running.events() if e["kind"] == "formed" and e["worker"] == "b"]
        assert healed[-1]["moved"]["state_bytes"] > 0
        stop_and_compare(running, alone, "transformer", "adamw", "a", "b", "c")


def test_an_exception_in_user_code_ends_the_run_with_its_traceback(cluster):
    with cluster(main=failing_work, arguments=(4,), workers=2) as running:
        start(running, "a", "b")
        running.wait_for_end()
        assert set(running.exit_codes().values()) == {1}
        log = (running.folder / "coordinator.log").read_text()
        assert "ZeroDivisionError" in log
        assert "failing_work" in log


def failing_work(at):
    run = make_run("mlp")
    with run:
        for step in run.steps(total=20):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()
            if step.number == at:
                1 / 0  # noqa: B018


def test_one_signal_stops_the_whole_run_after_the_same_step(cluster):
    with cluster(main=endless_work, arguments=("mlp", "sgd", {}), workers=3) as running:
        start_together(running, "a", "b", "c")
        stop(running, "b", "a", "c")
        assert len({final["digest"] for final in running.finals().values()}) == 1


@pytest.mark.parametrize("strategy", [AdaptationStrategy.LINEAR, AdaptationStrategy.SQUARE_ROOT])
def test_batch_and_rate_follow_the_workers_and_samples_come_once(cluster, strategy):
    config = {"lr_adaptation_strategy": strategy}
    settings = {
        "base_workers": 2,
        "batch_size": 24,
        "clip_grad_norm": None,
    }
    work = ("mlp", "adamw", settings)
    with cluster(main=endless_work, arguments=work, workers=2, config=config) as running:
        start_together(running, "a", "b")
        running.wait_for_step(running.committed_step() + 5)
        running.kill("b")
        wait_until_together(running, "a")
        running.wait_for_step(running.committed_step() + 8)
        start(running, "c")
        wait_until_together(running, "a", "c")
        running.wait_for_step(running.committed_step() + 5)
        schedule = base_rates(stop(running, "a", "c"))
        events = [event for event in running.events() if event["kind"] == "commit"]
        assert {1, 2} <= {e["workers"] for e in events}
        for event in events:
            assert event["samples"] <= 12 * event["workers"]
        assert max(e["samples"] for e in events if e["workers"] == 2) == 24
        on_two = {e["step"]: e["learning_rate"] for e in events if e["workers"] == 2}
        on_one = {e["step"]: e["learning_rate"] for e in events if e["workers"] == 1}
        assert not on_one.keys() & on_two.keys(), "one rate and one size on all members"
        factor = 0.5 if strategy is AdaptationStrategy.LINEAR else 0.5**0.5
        for step, rate in on_two.items():
            assert rate == pytest.approx(schedule[step])
        for step, rate in on_one.items():
            assert rate == pytest.approx(schedule[step] * factor)


def base_rates(steps):
    """What the scheduler alone would have each step use."""
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def quiet_work(kind, total):
    torch.set_num_threads(1)
    train(make_run(kind), total)


@pytest.mark.parametrize("size", [1, 4])
def test_the_same_script_gives_the_same_bits_on_any_cluster(cluster, alone, size):
    everybody = PATIENT | {"min_workers": size}
    with cluster(
        main=quiet_work, arguments=("convnet", 12), workers=size, config=everybody
    ) as running:
        start(running, *"abcd"[:size])
        running.wait_for_end()
        assert set(running.finals()) == set("abcd"[:size]), running.describe()
        assert digests(running) == {alone("convnet", "adamw", 12)[0]}


def test_everybody_asked_to_leave_stops_the_run_in_peace(cluster):
    with cluster(main=endless_work, arguments=("mlp", "sgd", {}), workers=3) as running:
        start_together(running, "a", "b", "c")
        for name in "abc":
            running.ask_to_leave(name)
        running.wait_for_end()
        assert set(running.exit_codes().values()) == {EXIT_UNFINISHED}
        assert {f["outcome"] for f in running.finals().values()} <= {"left", "stopped"}


def saving_work(folder, total):
    plan = CheckpointPlan(location=folder, schedule=CheckpointSchedule(every_steps=5))
    train(make_run("convnet", checkpoints=plan), total)


def test_a_stopped_run_goes_on_at_another_size_with_the_same_bits(cluster, alone, tmp_path):
    folder = tmp_path / "checkpoints"
    with cluster(main=saving_work, arguments=(folder, 17), workers=3, name="first") as running:
        start(running, "a", "b", "c")
        running.wait_for_end()
        assert set(running.exit_codes().values()) == {0}, running.describe()
    with cluster(main=saving_work, arguments=(folder, 40), workers=2, name="second") as running:
        start(running, "x", "y")
        running.wait_for_end()
        assert digests(running) == {alone("convnet", "adamw", 40)[0]}
        assert {e["step"] for e in running.events() if e["kind"] == "commit"} == set(range(17, 40))


def test_a_preempted_run_leaves_an_emergency_checkpoint(cluster, tmp_path):
    folder = tmp_path / "checkpoints"
    with cluster(main=saving_work, arguments=(folder, ENDLESS), workers=2) as running:
        start_together(running, "a", "b")
        running.ask_to_leave("b")
        running.wait_until(lambda: "b" in running.finals(), "b's end")
        step = running.committed_step()
        running.wait_for_step(step + 5)
        events = [e for e in running.events() if e["kind"] == "checkpoint"]
        assert "emergency" in {e.get("type") for e in events}
        running.ask_to_leave("a")
        running.wait_for_end()
        assert set(running.exit_codes().values()) == {EXIT_UNFINISHED}


def leaving_the_loop(stops):
    """Leaves the loop after step 7, or stops the run after the first later step of both workers."""
    with make_run("mlp") as run:
        for step in run.steps(total=ENDLESS):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            if step.commit() and step.number >= 7:
                if not stops:
                    break
                if run.world_size == 2:
                    run.stop("no more progress")


def test_a_loop_that_is_left_early_is_an_error_that_says_what_to_do(cluster):
    with cluster(main=leaving_the_loop, arguments=(False,), workers=2) as running:
        start(running, "a", "b")
        running.wait_until(lambda: not running.living(), "all have ended")
        assert set(running.exit_codes().values()) == {1}
        assert "left after step 7, before its end; to end a run early call run.stop()" in (
            running.describe()
        )


def test_a_run_that_is_stopped_early_ends_together(cluster):
    with cluster(main=leaving_the_loop, arguments=(True,), workers=2) as running:
        start(running, "a", "b")
        running.wait_for_end()
        assert set(running.exit_codes().values()) == {EXIT_UNFINISHED}, running.describe()
        ends = running.finals().values()
        assert {(f["outcome"], f["reason"]) for f in ends} == {("stopped", "no more progress")}
        assert len({(f["committed_step"], f["digest"]) for f in ends}) == 1
