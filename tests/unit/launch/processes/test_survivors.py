"""Which members of an earlier launch are known to be gone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.journal_records import Seat
from tensorforge.launch.processes.survivors import is_gone
from tensorforge.processes import ProcessIdentity


def seat(process, hostname="127.0.0.1"):
    worker = WorkerId("worker-0", hostname, 0)
    return Seat(worker, "incarnation", str(process.pid), process.to_text())


@pytest.fixture
def living():
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_worker_that_lives_is_not_gone(living):
    assert not is_gone(seat(ProcessIdentity.of(living.pid)), "127.0.0.1")


def test_a_number_that_another_process_has_now_means_that_the_worker_is_gone(living):
    now = ProcessIdentity.of(living.pid)
    for before in (
        replace(now, started=now.started - 100),
        replace(now, boot="another-boot"),
        replace(now, namespace="pid:[1]"),
    ):
        assert is_gone(seat(before), "127.0.0.1")


def test_a_worker_that_was_killed_is_gone_even_before_it_is_reaped(living):
    process = ProcessIdentity.of(living.pid)
    living.kill()
    os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(seat(process), "127.0.0.1")
    living.wait()
    assert is_gone(seat(process, "10.0.0.5"), "10.0.0.5")


def test_nothing_is_known_of_a_worker_elsewhere_or_without_a_process():
    here = WorkerId("worker-0", "127.0.0.1", 0)
    assert not is_gone(Seat(here, "incarnation"), "127.0.0.1")
    assert not is_gone(Seat(here, "incarnation", "7", "what no version wrote"), "127.0.0.1")
    ended = ProcessIdentity("host", "", "", 1 << 22, 0.0)
    assert not is_gone(seat(ended, "10.0.0.6"), "10.0.0.5")


def test_the_journal_of_an_older_version_has_only_the_number(living):
    worker = WorkerId("worker-0", "127.0.0.1", 0)
    assert not is_gone(Seat(worker, "incarnation", str(living.pid)), "127.0.0.1")
    living.kill()
    living.wait()
    assert is_gone(Seat(worker, "incarnation", str(living.pid)), "127.0.0.1")
