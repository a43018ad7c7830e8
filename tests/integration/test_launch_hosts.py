"""`tensorforge run --host` beyond this machine: workers of another host join with the run's token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOY = str(Path(__file__).with_name("toy_train.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "char_transformer.py")
TENSORFORGE = [sys.executable, "-m", "tensorforge"]
FAST = ["--stability-window", "0.05", "--heartbeat-timeout", "3"]


@pytest.fixture
def run_here(distant_host, tmp_path):
    started = []

    def start(script, *arguments):
        folder = tmp_path / "run"
        options = ["--json", "--host", distant_host.here, "--run-dir", str(folder), *FAST]
        process = subprocess.Popen(
            [*TENSORFORGE, "run", *options, script, *arguments], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, folder

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def there(host, *words, **options):
    """A command on the other host; nothing of this one's environment tells it of the run."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("TENSORFORGE_")}
    command = ["ip", "netns", "exec", host.namespace, *TENSORFORGE, *words]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def until(process, kind, fits=lambda _: True):
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == kind and fits(event):
            return event
    raise AssertionError(f"no {kind} came")


def test_a_worker_of_another_host_joins_with_the_token_and_not_without(run_here, distant_host):
    run, folder = run_here(TOY, "--steps", "100000")
    address = until(run, "coordinator_started")["address"]
    assert address.startswith(f"{distant_host.here}:")
    token = folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    with there(distant_host, "worker", "-c", address, TOY) as stranger:
        _, errors = stranger.communicate()
        assert stranger.returncode == 1
        assert "error: " in errors
        assert "token" in errors
        assert "Traceback" not in errors
    words = ["worker", "-c", address, "--token-file", str(token), "--id", "far", TOY]
    with there(distant_host, *words, "--steps", "100000") as far:
        until(run, "generation_formed", lambda e: set(e["members"]) == {"worker-0", "far"})
        far.send_signal(signal.SIGTERM)
        out, errors = far.communicate()
        assert far.returncode == 0, out + errors
    until(run, "generation_formed", lambda e: set(e["members"]) == {"worker-0"})
    with there(distant_host, "status", "-c", address, "--token-file", str(token), "--json") as seen:
        out, errors = seen.communicate()
        assert [worker["id"] for worker in json.loads(out)["workers"]] == ["worker-0"], errors
    run.send_signal(signal.SIGINT)
    assert until(run, "outcome")["code"] == 130


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.may_leak("files", "torch leaves a folder for compiled kernels")
def test_training_on_two_hosts_gives_the_same_bits(run_here, distant_host, tmp_path):
    run, folder = run_here(EXAMPLE, "--steps", "150")
    address = until(run, "coordinator_started")["address"]
    words = ["worker", "-c", address, "--token-file", str(folder / "token"), "--id", "far"]
    with there(distant_host, *words, "--run-dir", str(folder), EXAMPLE, "--steps", "150") as far:
        until(run, "generation_formed", lambda e: len(e["members"]) == 2)
        assert until(run, "outcome")["code"] == 0
        out, errors = far.communicate()
        assert far.returncode == 0, out + errors
    alone = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "150"], capture_output=True, text=True, check=True
    )
    digest = alone.stdout.rpartition("digest ")[2].partition(";")[0]
    assert f"digest {digest}" in out
