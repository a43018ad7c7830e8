"""What ends or changes a process: accesses of the CPU to device memory, forks, exits, the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("device_library")

ROOT = Path(__file__).parents[2]


def run(script, **environment):
    prelude = "import ctypes, os, torch\nfrom tests.accelerator import sim\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("access", ["ctypes.string_at({0}, 4)", "ctypes.memset({0}, 0, 4)"])
def test_an_access_by_the_cpu_ends_the_process_and_is_told(access):
    number = "number = torch.ones(3, device='sim:1')\nsim.synchronize(1)\n"
    done = run(number + access.format("number.data_ptr()"))
    assert done.returncode == -signal.SIGSEGV
    assert "STRAY ACCESS: the CPU touched memory of sim:1 at offset 0 " in done.stderr


def test_a_cpu_kernel_on_a_device_address_faults():
    done = run(
        "number = torch.ones(4096, device='sim')\n"
        "sim.synchronize()\n"
        "pointer = (ctypes.c_float * 4096).from_address(number.data_ptr())\n"
        "torch.frombuffer(pointer, dtype=torch.float32).sum()\n"
    )
    assert done.returncode == -signal.SIGSEGV
    assert "STRAY ACCESS" in done.stderr


def test_a_process_that_was_forked_before_the_device_was_used_may_use_it():
    done = run(
        "child = os.fork()\n"
        "assert torch.ones(3, device='sim').sum().item() == 3\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("schedule", ["on demand", "side streams first", "jittered"])
def test_a_process_ends_with_work_under_way(schedule):
    done = run(
        "side = sim.Stream()\n"
        "numbers = torch.ones(100, 100, device='sim')\n"
        "for _ in range(200): numbers = numbers @ numbers\n"
        "side.wait_stream(sim.current_stream())\n"
        "with side: numbers = numbers + 1\n"
        "print('done')\n",
        SIM_SCHEDULE=schedule,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_the_environment_says_which_devices_are_visible():
    count = "print(sim.device_count(), sim.is_available(), torch.accelerator.is_available())"
    assert run(count, SIM_VISIBLE_DEVICES="0,1,2,3").stdout == "4 True True\n"
    assert run(count, SIM_VISIBLE_DEVICES="").stdout == "0 False False\n"
