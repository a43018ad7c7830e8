"""`tensorforge run --dashboard` with real processes: the pages come and go with the run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

TOY = Path(__file__).with_name("toy_train.py")


def test_the_pages_of_a_run_are_served_while_it_runs(tmp_path):
    stop, run = tmp_path / "stop", tmp_path / "run"
    command = [sys.executable, "-m", "tensorforge", "run", "--json", "--dashboard", "0"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(run), str(TOY), "--until", str(stop)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["event"] == "dashboard"
        with httpx.Client(base_url=facts["url"], follow_redirects=True) as client:
            sign_in(client, facts["token"])
            wait_for(lambda: "worker-0" in client.get("/runs/run").text)
            assert 'action="/runs/run/stop"' in client.get("/runs/run").text
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        stop.touch()
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    _, alive = psutil.wait_procs(children, timeout=30)
    assert [child.cmdline() for child in alive] == []


def sign_in(client: httpx.Client, token: str) -> None:
    def answers() -> bool:
        try:
            return client.post("/sign-in", data={"token": token}).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(answers)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
