"""`tensorforge chaos` against a real job: every kind of strike, then the judgement."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorforge.launch.run_directory import read_record

TOY = str(Path(__file__).with_name("toy_train.py"))


@pytest.fixture
def job(tmp_path):
    """A job of three workers that goes on until it is stopped."""
    folder = tmp_path / "run"
    options = ["-n", "3", "--max-workers", "4", "--stability-window", "0.1", "--max-restarts", "99"]
    options += ["--heartbeat-timeout", "1", "--failure-tolerance", "100", "--max-failures", "99"]
    command = [sys.executable, "-m", "tensorforge", "run", "--plain", "--run-dir", str(folder)]
    log = (tmp_path / "launcher.log").open("w")
    launcher = subprocess.Popen(
        [*command, *options, TOY, "--steps", "1000000"], stdout=log, stderr=subprocess.STDOUT
    )
    limit = time.monotonic() + 60
    while not (folder / "workers").is_dir():
        assert time.monotonic() < limit, (tmp_path / "launcher.log").read_text()
        assert launcher.poll() is None, (tmp_path / "launcher.log").read_text()
        time.sleep(0.05)
    yield folder
    launcher.terminate()
    launcher.wait()
    log.close()


def chaos(*options: str):
    return subprocess.run(
        [sys.executable, "-m", "tensorforge", "chaos", *options],
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_job_survives_a_storm_of_every_kind_and_a_broken_promise_is_found(job):
    options = ["--run-dir", str(job), "--seed", "7", "--duration", "5", "--rate", "2"]
    done = chaos(*options, "--freeze-seconds", "1.5", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["survived"]
    kinds = {strike["kind"] for strike in report["strikes"]}
    assert kinds == {"kill", "freeze", "leave", "join", "coordinator-kill"}
    assert any(strike["note"] == "killed" for strike in report["strikes"])
    assert len(report["verdicts"]) == 4

    (job / "workers" / "liar.jsonl").write_text(
        '{"kind": "commit", "time": 1, "worker": "liar", "step": 0, "samples": 7}\n'
    )
    address = read_record(job).coordinator_address
    found = chaos("-c", address, "--run-dir", str(job), "--kinds", "kill", "--duration", "0.1")
    assert found.returncode == 1
    assert "BROKEN  every step is committed exactly once" in found.stdout
    assert "held    generations only grow" in found.stdout


def test_a_storm_without_a_job_is_refused(tmp_path):
    for options, message in (
        ([], "name the job with"),
        (["--run-dir", str(tmp_path)], "no run was launched in"),
        (["--kinds", "flood", "--run-dir", str(tmp_path)], "must be among kill, freeze"),
        (["-c", "127.0.0.1:1"], "no coordinator answers at 127.0.0.1:1"),
    ):
        done = chaos(*options)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_a_storm_can_be_looked_at_beforehand():
    options = ["--seed", "1", "--duration", "10", "--rate", "0.5", "--dry-run"]
    done = chaos(*options, "--json")
    strikes = json.loads(done.stdout)["strikes"]
    assert [strike["kind"] for strike in strikes] == ["join", "leave", "coordinator-kill"]
    assert "8.18 s  coordinator-kill" in chaos(*options).stdout
