"""`tensorforge run` with real processes: a coordinator, workers that need no torch, and a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tensorforge.elastic import CoordinatorClient
from tensorforge.elastic.protocol.token_files import read_token
from tensorforge.launch.run_directory import read_record

TOY = str(Path(__file__).with_name("toy_train.py"))
FAST = ["--stability-window", "0.05", "--heartbeat-timeout", "3"]


class Launched:
    """A launcher's process and what it printed."""

    def __init__(self, folder: Path, *options: str, script: str = TOY, arguments=()):
        self.folder = folder
        command = [sys.executable, "-m", "tensorforge", "run", "--json", "--run-dir", str(folder)]
        self.process = subprocess.Popen(
            [*command, *FAST, *options, script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder.parent,
        )
        self.events: list[dict] = []

    def until(self, kind: str, **facts):
        """Read on to the next event like this and return it."""
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == kind and facts.items() <= event.items():
                return event
        code, errors = self.process.wait(), self.process.stderr.read()
        raise AssertionError(f"no {kind} {facts} came; exit {code}; {self.events} {errors}")

    def had(self, kind: str, **facts):
        """The event like this that was read already, or else the next one."""
        found = [event for event in self.all(kind) if facts.items() <= event.items()]
        return found[-1] if found else self.until(kind, **facts)

    def saw_members(self, fits) -> None:
        """Read on until a generation was formed whose members fit; it may have been read already."""
        while not any(fits(set(event["members"])) for event in self.all("generation_formed")):
            self.until("generation_formed")

    def end(self):
        """Read to the end; the exit code."""
        self.events += [json.loads(line) for line in self.process.stdout]
        self.errors = self.process.stderr.read()
        return self.process.wait(timeout=100)

    def all(self, kind: str):
        return [event for event in self.events if event["event"] == kind]

    @property
    def notices(self) -> str:
        return "\n".join(event["text"] for event in self.all("notice"))

    @property
    def outcome(self) -> dict:
        return self.events[-1]

    @property
    def record(self):
        return read_record(self.folder)

    @contextmanager
    def client(self):
        token = read_token(self.folder / "token")
        with CoordinatorClient(self.record.coordinator_address, token=token) as client:
            yield client


@pytest.fixture
def launch(tmp_path):
    started: list[Launched] = []

    def start(*options: str, script: str = TOY, arguments=(), folder: str = "run") -> Launched:
        launched = Launched(tmp_path / folder, *options, script=script, arguments=arguments)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
        launched.process.communicate()


def gone(*pids: int) -> None:
    limit = time.monotonic() + 30
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < limit, f"process {pid} is still there"
            time.sleep(0.01)


def test_a_run_that_finishes_ends_with_success_and_leaves_its_logs(launch):
    launched = launch("-n", "2", "--min-workers", "2", arguments=["--", "--steps", "10"])
    assert launched.end() == 0, launched.outcome
    assert launched.outcome["event"] == "outcome"
    assert launched.outcome["code"] == 0
    assert [event["worker"] for event in launched.all("worker_started")] == ["worker-0", "worker-1"]
    assert "worker-1 is here" in (launched.folder / "logs" / "worker-1.log").read_text()
    steps = [event["step"] for event in launched.all("step_committed")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 9
    (formed,) = {event["generation"] for event in launched.all("generation_formed")}
    assert formed == 1
    assert set(launched.all("generation_formed")[-1]["phases"]) >= {"barrier", "first commit"}


def test_dead_workers_and_a_dead_coordinator_are_replaced_and_training_finishes(launch, tmp_path):
    enough = tmp_path / "enough"
    options = ["-n", "3", "--min-workers", "2", "--stability-window", "0.5"]
    launched = launch(*options, arguments=["--until", str(enough)])
    launched.saw_members(lambda members: len(members) == 3)
    record = launched.record
    os.kill(record.workers["worker-1"].pid, signal.SIGKILL)
    launched.saw_members(lambda members: members == {"worker-0", "worker-2"})
    os.kill(launched.record.coordinator.pid, signal.SIGKILL)
    launched.until("coordinator_started", address=record.coordinator_address)
    launched.saw_members(lambda members: "worker-3" in members)
    enough.touch()
    assert launched.end() == 0, launched.outcome
    assert "worker-1 was killed by SIGKILL" in launched.notices
    assert "the coordinator was killed by SIGKILL" in launched.notices
    generations = [event["generation"] for event in launched.all("generation_formed")]
    assert generations == sorted(generations)
    assert generations[-1] >= 3


def test_a_standby_takes_the_place_of_a_dead_worker_without_a_start(launch):
    launched = launch(
        *["-n", "2", "--min-workers", "2", "--standbys", "1"], arguments=["--steps", "100000"]
    )
    launched.until("generation_formed", generation=1)
    members = set(launched.all("generation_formed")[-1]["members"])
    joined = {event["worker"] for event in launched.all("worker_joined")}
    if len(joined) < 3:
        joined.add(launched.until("worker_joined")["worker"])
    (standby,) = joined - members
    victim = min(members)
    os.kill(launched.record.workers[victim].pid, signal.SIGKILL)
    formed = launched.until("generation_formed", generation=2)
    assert set(formed["members"]) == members - {victim} | {standby}
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 143


def test_a_dead_worker_is_replaced_by_the_spare_that_was_started_for_it(launch):
    launched = launch("-n", "1", arguments=["--steps", "100000"])
    assert launched.until("spare_ready")["worker"] == "worker-1"
    os.kill(launched.record.workers["worker-0"].pid, signal.SIGKILL)
    launched.saw_members(lambda members: members == {"worker-1"})
    assert launched.had("spare_ready", worker="worker-2")
    assert set(launched.record.workers) == {"worker-1"}
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == 130
    assert [event["worker"] for event in launched.all("worker_exited")] == ["worker-0", "worker-1"]


def test_scaling_and_leaving_are_followed(launch):
    options = ["-n", "1", "--max-workers", "3"]
    launched = launch(*options, arguments=["--steps", "100000"])
    launched.until("generation_formed", generation=1)
    with launched.client() as client:
        client.scale(3, "a test")
        launched.saw_members(lambda members: len(members) == 3)
        client.scale(2, "a test")
        launched.had("worker_exited", code=0)
        leaver = client.status().workers[0].id
        client.remove(leaver, "a test")
        launched.had("worker_exited", worker=leaver, code=0)
        launched.had("worker_released", worker=leaver)
        launched.process.send_signal(signal.SIGINT)
        assert launched.end() == 130
    assert "retires: a test wants 2 workers" in launched.notices
    assert f"{leaver} retires: a test asked for it; 1 worker wanted now" in launched.notices
    assert not launched.record.workers
    assert len(launched.all("worker_started")) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_stops_training_in_peace(launch, number):
    launched = launch("-n", "2", "--min-workers", "2", arguments=["--steps", "100000"])
    launched.until("generation_formed", generation=1)
    launched.process.send_signal(number)
    assert launched.end() == 128 + number
    assert [event["code"] for event in launched.all("worker_exited")] == [0, 0]
    assert {event["outcome"] for event in launched.all("worker_concluded")} == {"stopped"}
    assert launched.outcome["reason"] == "interrupted before it finished"


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


def test_a_second_signal_ends_everything_at_once(launch, tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    launched = launch("-n", "2", script=str(script))
    launched.until("log", line="deaf")
    launched.until("log", line="deaf")
    launched.process.send_signal(signal.SIGINT)
    launched.until("stop_requested")
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == 130
    assert [event["code"] for event in launched.all("worker_exited")] == [-9, -9]


def test_a_graceful_stop_does_not_wait_for_ever(launch, tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    launched = launch("--stop-timeout", "0.5", script=str(script))
    launched.until("log", line="deaf")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 143
    assert "did not exit in time and is killed" in launched.notices


def test_a_killed_launcher_leaves_no_process_behind_and_the_run_goes_on_in_its_folder(launch):
    first = launch("-n", "2", arguments=["--steps", "100000"])
    first.saw_members(lambda members: len(members) == 2)
    record, generation = first.record, first.all("generation_formed")[-1]["generation"]
    second = launch(arguments=["--steps", "5"])
    assert second.end() == 1
    assert "another launcher runs in" in second.errors
    first.process.kill()
    gone(record.coordinator.pid, *(worker.pid for worker in record.workers.values()))
    third = launch("-n", "2", arguments=["--steps", "5"])
    assert third.end() == 0, third.errors
    formed = third.all("generation_formed")[0]
    assert formed["generation"] > generation


def test_a_worker_from_elsewhere_joins_and_leaves(launch):
    launched = launch("-n", "1", arguments=["--steps", "100000"])
    launched.until("generation_formed", generation=1)
    address = launched.record.coordinator_address
    command = [sys.executable, "-m", "tensorforge", "worker", "-c", address, "--id", "far-1"]
    command += ["--token-file", str(launched.folder / "token")]
    with subprocess.Popen(
        [*command, "--json", TOY, "--steps", "100000"], stdout=subprocess.PIPE, text=True
    ) as far:
        assert json.loads(far.stdout.readline())["worker"] == "far-1"
        launched.saw_members(lambda members: members == {"worker-0", "far-1"})
        far.send_signal(signal.SIGTERM)
        assert far.wait() == 0
    launched.had("worker_released", worker="far-1")
    launched.process.send_signal(signal.SIGTERM)
    launched.end()
    assert len(launched.all("worker_started")) == 1
