"""The launcher with a crew whose machines share no folder with it, vanish, and are taken away."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.environment import RUN_DIR
from tensorforge.launch import JsonDisplay, Launcher, LaunchSettings, SupervisionPolicy
from tensorforge.launch.crew.crew import Logged, Notice, Placed, Vanished
from tensorforge.launch.crew.local_crew import LocalCrew
from tensorforge.launch.processes.children import Exited
from tensorforge.launch.run_log_reader import RunLogTail

TOY = str(Path(__file__).with_name("toy_train.py"))


class FarCrew(LocalCrew):
    """Local processes that look like those of other machines.

    A worker that is killed vanishes. The machine of `noticed` is taken away once that worker has logged a
    step.
    """

    def __init__(self, folder: Path, noticed: str = "") -> None:
        super().__init__()
        self.folder, self.noticed = folder, noticed
        self.orders = {}
        self.tail = RunLogTail(folder / "workers")

    def start(self, name, order):
        self.orders[name] = order
        variables = {**order.variables, RUN_DIR.name: str(self.folder)}
        super().start(name, dataclasses.replace(order, variables=variables))

    def poll(self, timeout):
        events = [self.seen_from_afar(event) for event in super().poll(timeout)]
        logged = [Logged(str(line.get("worker")), line) for line in self.tail.read()]
        if any(e.worker == self.noticed and e.line["kind"] == "commit" for e in logged):
            events.append(Notice(self.noticed, 60.0, "spot"))
            self.noticed = ""
        return [*logged, *events]

    def seen_from_afar(self, event):
        if isinstance(event, Placed):
            return dataclasses.replace(event, host=f"host-of-{event.worker}", devices=("gpu-0",))
        if isinstance(event, Exited) and event.code == -9:
            return Vanished(event.child, "its node is silent")
        return event

    def close(self):
        self.tail.close()
        super().close()


def launch(tmp_path, capsys, *arguments, noticed="", **policy):
    crews = []

    def make():
        crews.append(FarCrew(tmp_path / "far", noticed))
        return crews[-1]

    settings = LaunchSettings(
        script=TOY,
        arguments=arguments,
        run_dir=tmp_path / "run",
        spares=0,
        # At least two, so that no worker completes the training before the other one has joined.
        config=ElasticTrainingConfig(
            min_workers=2,
            rescale_timeout_ms=100_000,
            stability_window_ms=50,
            worker_heartbeat_timeout_ms=3000,
        ),
        policy=SupervisionPolicy(workers=2, min_workers=2, **policy),
    )
    outcome = Launcher(settings, JsonDisplay(), crew=make).run()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return outcome, events, crews[0]


def of(events, kind):
    return [event for event in events if event["event"] == kind]


@pytest.mark.parametrize("restarts", [0, 10])
def test_a_vanished_worker_is_replaced_without_spending_a_restart(tmp_path, capsys, restarts):
    arguments = ("--die-at", "5", "--only", "worker-1")
    outcome, events, _ = launch(tmp_path, capsys, *arguments, max_restarts=restarts)
    assert outcome.code == 0, events
    assert [e["worker"] for e in of(events, "worker_vanished")] == ["worker-1"]
    assert [e["worker"] for e in of(events, "worker_started")][:3] == [
        "worker-0",
        "worker-1",
        "worker-2",
    ]
    assert of(events, "worker_started")[0]["host"] == "host-of-worker-0"
    assert not [e for e in of(events, "worker_exited") if e["worker"] == "worker-1"]


def test_steps_arrive_from_machines_without_a_shared_folder(tmp_path, capsys):
    outcome, events, _ = launch(tmp_path, capsys, "--steps", "10")
    assert outcome.code == 0, events
    steps = [event["step"] for event in of(events, "step_committed")]
    assert steps
    assert steps == sorted(set(steps))
    assert not (tmp_path / "run" / "workers").exists()


def test_a_worker_whose_machine_is_taken_away_leaves_and_is_replaced_elsewhere(tmp_path, capsys):
    arguments = ("--steps", "200")
    outcome, events, crew = launch(tmp_path, capsys, *arguments, noticed="worker-1", max_restarts=0)
    assert outcome.code == 0, events
    assert crew.orders["worker-2"].avoid == {"host-of-worker-1"}
    (exited,) = [e for e in of(events, "worker_exited") if e["worker"] == "worker-1"]
    assert exited["code"] in (0, 75)
