"""On a terminal the run is shown live."""

from __future__ import annotations

import os
import pty
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
