"""Which members of an earlier launch are known to be gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.machine.journal_records import Seat
from tensorforge.launch.processes.survivors import is_gone


def seat(pid, hostname="127.0.0.1", name="worker-0"):
    return Seat(WorkerId(name, hostname, 0), "incarnation", None if pid is None else str(pid))


@pytest.fixture
def living():
    environment = {**os.environ, "TENSORFORGE_WORKER_ID": "worker-0"}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_worker_that_lives_is_not_gone(living):
    assert not is_gone(seat(living.pid), "127.0.0.1")


def test_a_worker_that_was_given_no_name_is_not_gone_while_it_lives():
    name = f"{socket.gethostname()}-{os.getpid()}"
    assert not is_gone(seat(os.getpid(), name=name), "127.0.0.1")
    assert is_gone(seat(os.getpid()), "127.0.0.1")


def test_a_number_that_another_process_has_now_means_that_the_worker_is_gone(living):
    assert is_gone(seat(living.pid, name="worker-1"), "127.0.0.1")


def test_a_worker_that_was_killed_is_gone_even_before_it_is_reaped(living):
    living.kill()
    os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(seat(living.pid), "127.0.0.1")
    living.wait()
    assert is_gone(seat(living.pid, "10.0.0.5"), "10.0.0.5")


def test_nothing_is_known_of_a_worker_elsewhere_or_without_a_number():
    assert not is_gone(seat(None), "127.0.0.1")
    assert not is_gone(seat(1 << 22, "10.0.0.6"), "10.0.0.5")
