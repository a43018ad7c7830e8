"""Which process is meant, whether it runs, and who is hit by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

import psutil
import pytest

from tensorforge import processes
from tensorforge.encoding import decode, encode
from tensorforge.processes import ProcessIdentity


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_this_process_runs():
    here = ProcessIdentity.current()
    assert here.pid == os.getpid()
    assert here.is_running()
    assert not here.has_ended()
    assert str(here) == f"process {here.pid} on {here.host}"


def test_a_process_has_ended_once_it_was_killed_and_before_it_is_reaped(child):
    process = ProcessIdentity.of(child.pid)
    assert process.is_running()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_running()
    assert process.has_ended()
    child.wait()
    assert process.has_ended()
    assert not ProcessIdentity.of(child.pid).is_running()


def test_a_later_process_with_the_same_number_is_another_one():
    here = ProcessIdentity.current()
    before = replace(here, started=here.started - 100)
    assert not before.is_running()
    assert before.has_ended()


def test_nothing_is_certain_of_another_host_or_another_container():
    here = ProcessIdentity.current()
    for elsewhere in (replace(here, host="another"), replace(here, namespace="pid:[1]")):
        assert not elsewhere.is_running()
        assert not elsewhere.has_ended()


def test_a_restart_of_the_host_ends_its_processes():
    before = replace(ProcessIdentity.current(), boot="another-boot")
    assert not before.is_running()
    assert before.has_ended()


def test_what_an_older_file_does_not_tell_is_not_compared():
    mine = psutil.Process()
    assert ProcessIdentity.from_clock_time(mine.pid, mine.create_time()).is_running()
    assert ProcessIdentity.from_clock_time(mine.pid, mine.create_time() - 100).has_ended()


def test_a_system_without_boot_and_namespace_compares_the_rest(monkeypatch):
    full = ProcessIdentity.current()
    monkeypatch.setattr(processes, "_boot", lambda: "")
    monkeypatch.setattr(processes, "_namespace", lambda: "")
    bare = ProcessIdentity.current()
    assert (bare.boot, bare.namespace) == ("", "")
    assert bare.is_running()
    assert full.is_running()


def test_setting_the_clock_does_not_end_a_process(monkeypatch):
    here = ProcessIdentity.current()
    shift, boot_time, create_time = 3600.0, psutil.boot_time(), psutil.Process().create_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time + shift)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time + shift)
    assert here.is_running()


@pytest.mark.parametrize("host", ["node-7", "a host=b boot=c", ""])
def test_text_and_encoding_give_back_the_same_process(host):
    process = ProcessIdentity(host, "b" * 36, "pid:[4026531836]", 12, 34.56)
    assert ProcessIdentity.from_text(process.to_text()) == process
    assert decode(encode(process), ProcessIdentity) == process
    unknown = ProcessIdentity(host, "", "", 12, -1.0)
    assert ProcessIdentity.from_text(unknown.to_text()) == unknown


@pytest.mark.parametrize("text", ["", "7", "saved by process 1 of host, started 1.00", "pid=x"])
def test_any_other_text_is_no_process(text):
    assert ProcessIdentity.from_text(text) is None


def test_a_signal_never_hits_another_process(child):
    process = ProcessIdentity.of(child.pid)
    assert not replace(process, started=process.started - 100).send_signal(signal.SIGKILL)
    assert not replace(process, namespace="pid:[1]").send_signal(signal.SIGKILL)
    assert child.poll() is None
    assert process.send_signal(signal.SIGKILL)
    child.wait()
    assert not process.send_signal(signal.SIGKILL)
