"""Trains a transformer while workers and the coordinator are killed, and proves that nothing was lost.

python examples/demo.py              (or `make demo`)
python examples/demo.py --sabotage   compares with another seed, so that the proof must fail

`tensorforge run` trains `char_transformer.py` on three workers. One is killed, one leaves, one joins, one is
frozen, and the coordinator is killed: with commands and signals that any operator can use. Then the same
script runs undisturbed in one process, and the weights are compared bit by bit. The exit code is 0 only if
every claim holds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import demo_report
from tensorforge.train.run_log import read_run_logs

SCRIPT = Path(__file__).with_name("char_transformer.py")
OUTPUT = Path("demo-output")
STEPS = 240
OPTIONS = ["--workers", "3", "--max-workers", "4"]
TIMING = ["--stability-window", "0.2", "--heartbeat-timeout", "1.5"]
TENSORFORGE = [sys.executable, "-m", "tensorforge"]
STEPS_PER_LINE = 20


class Storm:
    """A launched run that is followed through its JSON lines and disturbed at certain steps."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.disturbances: list[tuple[int, str]] = []
        self.rescales: dict[int, dict[str, Any]] = {}
        self.exits: dict[str, int] = {}
        self.facts: dict[str, Any] = {}
        self._step = -1
        self._members: set[str] = set()
        self._pids: dict[str, int] = {}
        self._coordinator = 0
        self._lost: dict[str, float] = {}
        self._commands: list[subprocess.Popen[str]] = []
        self._script = self._disturbances()
        self._waiting_for: Callable[[], bool] = lambda: True
        self._started = time.monotonic()

    def run(self) -> int:
        """Launch the run, follow it and disturb it until it ends; return the launcher's exit code."""
        words = [*OPTIONS, *TIMING, "--run-dir", str(self.folder), "--json"]
        command = [*TENSORFORGE, "run", *words, str(SCRIPT), "--steps", str(self.steps)]
        self._say("three workers start; importing torch takes them a few seconds")
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
            for line in launcher.stdout or ():
                self._handle(json.loads(line))
                if self._waiting_for():
                    self._waiting_for = next(self._script, lambda: False)
        for command in self._commands:
            command.wait()
        return launcher.returncode

    def _disturbances(self) -> Iterator[Callable[[], bool]]:
        """Yield a condition; once it holds, the code up to the next one disturbs the run."""
        yield lambda: self._is_at(30) and len(self._members) == 3
        self._disturb("kill -9 worker-1", lambda: self._send("worker-1", signal.SIGKILL))
        yield lambda: self._is_at(70) and "worker-3" in self._members
        self._disturb("tensorforge leave worker-0", lambda: self._order("leave", "worker-0"))
        yield lambda: self._is_at(100) and self._members == {"worker-2", "worker-3"}
        self._disturb("tensorforge scale 3", lambda: self._order("scale", "3"))
        yield lambda: self._is_at(135) and len(self._members) == 3
        self._disturb("kill -STOP worker-2", lambda: self._send("worker-2", signal.SIGSTOP))
        yield lambda: "worker-2" in self._lost and "worker-2" not in self._members
        yield lambda: time.monotonic() > self._lost["worker-2"] + 0.5
        self._disturb("kill -CONT worker-2", lambda: self._send("worker-2", signal.SIGCONT))
        yield lambda: self._is_at(180) and "worker-2" in self._members
        self.facts["came back"] = "worker-2"
        self._disturb("kill -9 coordinator", lambda: os.kill(self._coordinator, signal.SIGKILL))
        self.facts["coordinator killed at"] = time.time()
        killed = self._coordinator
        yield lambda: self._coordinator != killed
        self.facts["coordinator back at"] = time.time()

    def _is_at(self, step: int) -> bool:
        return self._step >= step

    def _send(self, worker: str, number: signal.Signals) -> None:
        os.kill(self._pids[worker], number)

    def _order(self, *words: str) -> None:
        """Run an operator's command in the background, while training goes on."""
        command = [*TENSORFORGE, *words, "--run-dir", str(self.folder)]
        self._commands.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True))

    def _disturb(self, text: str, action: Callable[[], None]) -> None:
        self.disturbances.append((self._step, text))
        self._say(demo_report.paint(f">>> {text}", "red"))
        action()

    def _say(self, text: str) -> None:
        place = f"step {self._step:3}" if self._step >= 0 else " " * 8
        print(f"{time.monotonic() - self._started:6.1f} s  {place}  {text}", flush=True)

    def _handle(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "coordinator_started":
                self._coordinator = event["pid"]
                if self.disturbances:
                    self._say("    a new coordinator has read its journal and leads again")
            case "worker_started":
                self._pids[event["worker"]] = event["pid"]
            case "worker_lost":
                self._lost.setdefault(event["worker"], time.monotonic())
            case "worker_exited":
                self.exits[event["worker"]] = event["code"]
            case "step_committed":
                self._committed(event)
            case "generation_formed":
                self._formed(event)
            case "notice" if event["level"] == "error":
                self._say(event["text"])

    def _committed(self, event: dict[str, Any]) -> None:
        self._step = event["step"]
        if self._step % STEPS_PER_LINE == 0 or self._step == self.steps - 1:
            bar = demo_report.paint("#" * round(event["loss"] * 10), "blue")
            workers = f"{len(self._members)} workers"
            self._say(f"{workers}  loss {event['loss']:6.4f}  {bar}")

    def _formed(self, event: dict[str, Any]) -> None:
        self._members = set(event["members"])
        told = self.rescales.get(event["generation"], {})
        self.rescales[event["generation"]] = event
        if "first commit" in event["phases"] and "first commit" not in told.get("phases", {}):
            total = sum(event["phases"].values())
            who = f"{event['size']} workers train again after {total:.0f} ms"
            start = "all three train" if len(self.rescales) == 1 else who
            self._say(demo_report.paint(f"    {start}", "green") + f"  ({event['reason']})")


def train_alone(folder: Path, steps: int, seed: int) -> int:
    """Run the same script undisturbed in one process; return its exit code."""
    words = [str(SCRIPT), "--steps", str(steps), "--seed", str(seed)]
    environment = {**os.environ, "TENSORFORGE_RUN_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], env=environment, stdout=subprocess.DEVNULL, check=False
    )
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sabotage", action="store_true", help="let the proof fail")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    started = time.monotonic()
    storm_folder, alone_folder = OUTPUT / "storm", OUTPUT / "undisturbed"
    for folder in (storm_folder, alone_folder):
        shutil.rmtree(folder, ignore_errors=True)
    print(
        "TensorForge trains one model twice.\n\n"
        f"1. In a storm: three workers, {arguments.steps} steps, and the disturbances\n"
        f"   tensorforge run {' '.join(OPTIONS)} examples/{SCRIPT.name} --steps {arguments.steps}\n",
        flush=True,
    )
    storm = Storm(storm_folder, arguments.steps)
    code = storm.run()
    print(
        f"\n2. Undisturbed: one process, no coordinator\n"
        f"   python examples/{SCRIPT.name} --steps {arguments.steps}\n",
        flush=True,
    )
    alone_code = train_alone(alone_folder, arguments.steps, 2 if arguments.sabotage else 1)
    evidence = demo_report.Evidence(
        steps=arguments.steps,
        codes=(code, alone_code),
        storm=read_run_logs(storm_folder),
        alone=read_run_logs(alone_folder),
        disturbances=storm.disturbances,
        rescales=list(storm.rescales.values()),
        exits=storm.exits,
        facts=storm.facts,
    )
    claims = demo_report.check(evidence)
    demo_report.print_report(evidence, claims)
    demo_report.save(OUTPUT, evidence, claims)
    holds = all(claim.holds for claim in claims)
    print(
        f"\nLook at {OUTPUT / 'demo.html'} and {OUTPUT / 'loss.png'}, or open both runs in a browser:"
    )
    print(f"   {Path(sys.executable).parent / 'tensorforge'} dashboard {OUTPUT}")
    verdict = "All claims hold" if holds else "A CLAIM FAILED"
    print(demo_report.paint(verdict, "green" if holds else "red"), end="")
    print(f" ({time.monotonic() - started:.0f} s).")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
