"""On a terminal the run is shown live."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

TOY = str(Path(__file__).with_name("toy_train.py"))


def test_a_terminal_gets_the_live_view_and_is_given_back(tmp_path):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tensorforge", "run", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    run = subprocess.Popen(
        [*command, TOY, "--steps", "20"], stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # the other side is closed: how a terminal says that this was all
        pass
    finally:
        os.close(master)
    assert run.wait() == 0
    text = shown.decode()
    assert "generation 1 · 1 of 1 workers" in text
    assert "worker-0" in text
    assert "loss " in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor stays hidden"
    assert "training is complete" in text


def toy_run(folder: Path, *options: str, steps: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "tensorforge",
        "run",
        "--spares",
        "0",
        "--run-dir",
        str(folder),
    ]
    return [*command, *options, TOY, "--steps", str(steps)]


def endless(folder: Path, *options: str) -> list[str]:
    return toy_run(folder, *options, steps=100_000)


def outcome(folder: Path) -> str:
    lines = (folder / "workers" / "worker-0.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["outcome"]


def test_a_terminal_that_is_closed_stops_the_run_in_peace(tmp_path):
    master, slave = pty.openpty()
    # Whoever started the tests may have told them to ignore that a terminal is closed.
    command = ["env", "--default-signal=HUP", "setsid", "--ctty", *endless(tmp_path)]
    run = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while b"step 1" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    assert run.wait() == 128 + signal.SIGHUP
    assert outcome(tmp_path) == "stopped"


def test_a_reader_that_goes_away_stops_the_run_in_peace_and_nohup_is_respected(tmp_path):
    command = ["nohup", *endless(tmp_path, "--json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        while "step_committed" not in run.stdout.readline():
            pass
        run.send_signal(signal.SIGHUP)
        for _ in range(50):
            assert "stop_requested" not in run.stdout.readline()
        run.stdout.close()
        assert run.wait() == 128 + signal.SIGPIPE
    assert outcome(tmp_path) == "stopped"


def test_a_run_whose_standard_streams_are_closed_trains_in_silence(tmp_path):
    command = 'exec "$@" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command, "sh", *toy_run(tmp_path, steps=5)], check=True)
    assert outcome(tmp_path) == "complete"


def test_what_the_encoding_of_the_output_lacks_is_escaped(tmp_path):
    script = tmp_path / "printing.py"
    printing = "import os, runpy; os.write(1, b'\\xe6\\xbc\\xa2\\n')"
    script.write_text(f"{printing}; runpy.run_path({TOY!r}, run_name='__main__')")
    command = toy_run(tmp_path / "run", steps=2)
    command[command.index(TOY)] = str(script)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert rb"[worker-0] \u6f22" in done.stdout
