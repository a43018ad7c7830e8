"""Interrupt a run in the middle of an epoch and resume it on fewer workers: the weights are the same.

python examples/resume_elsewhere.py

Runs the character transformer three ways: straight through in one process; on three workers, interrupted
as by Ctrl-C; and the rest on two workers, from the checkpoint. Then compares.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorforge.train.run_log import read_run_logs

SCRIPT = Path(__file__).with_name("char_transformer.py")
INTERRUPT_AT, TOTAL = 25, 60


def launch(folder: Path, checkpoints: Path, workers: int, stop_at: int | None = None) -> None:
    """`tensorforge run` on so many workers, interrupted after a step if one is named."""
    command = [sys.executable, "-m", "tensorforge", "run", "--json", "--workers", str(workers)]
    words = [str(SCRIPT), "--steps", str(TOTAL), "--checkpoints", str(checkpoints)]
    with subprocess.Popen(
        [*command, "--min-workers", str(workers), "--run-dir", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        for line in process.stdout or ():
            event = json.loads(line)
            if event["event"] == "step_committed" and event["step"] == stop_at:
                process.send_signal(signal.SIGINT)
    steps = [event["step"] for event in read_run_logs(folder) if event["kind"] == "commit"]
    code = process.returncode
    print(f"{workers} workers: steps {min(steps)} to {max(steps)}, exit code {code}", flush=True)


def digests(folder: Path) -> set[str]:
    """The digests of the states with which the workers ended."""
    return {event["digest"] for event in read_run_logs(folder) if event["kind"] == "final"}


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch(folder / "first", folder / "checkpoints", 3, stop_at=INTERRUPT_AT)
        launch(folder / "second", folder / "checkpoints", 2)
        resumed = digests(folder / "second")
        straight = folder / "straight"
        subprocess.run(
            [sys.executable, str(SCRIPT), "--steps", str(TOTAL)],
            env={**os.environ, "TENSORFORGE_RUN_DIR": str(straight)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        expected = digests(straight)
    print(f"straight through:    {', '.join(expected)}\nstopped and resumed: {', '.join(resumed)}")
    return 0 if resumed == expected else 1


if __name__ == "__main__":
    sys.exit(main())
