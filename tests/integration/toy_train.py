"""A worker without torch: it follows the generations and counts steps, nothing more.

Misbehaviour is chosen by options; with --only it happens in the named worker alone.
"""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tensorforge.elastic import ElasticWorker, WorkerId
from tensorforge.errors import ClosedError, StaleGenerationError
from tensorforge.train.run_log import RunLog

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=30)
options.add_argument("--until", help="train until this file exists")
options.add_argument("--seconds", type=float, default=0.02)
options.add_argument("--only", default="")
options.add_argument("--raise-at", type=int)
options.add_argument("--hang-at", type=int)
options.add_argument("--exit-at", type=int)
options.add_argument("--die-at", type=int)
arguments = options.parse_args()

NAME = os.environ["TENSORFORGE_WORKER_ID"]
CHOSEN = arguments.only in ("", NAME)
asked_to_leave = threading.Event()
asked_to_stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked_to_leave.set())
signal.signal(signal.SIGUSR2, lambda *_: asked_to_stop.set())


def misbehave(step):
    if not CHOSEN:
        return
    if step == arguments.raise_at:
        raise ValueError(f"bad sample in step {step}")
    if step == arguments.exit_at:
        sys.exit(5)
    if step == arguments.die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == arguments.hang_at:
        hang()


def is_complete(step):
    if arguments.until is not None:
        return Path(arguments.until).exists()
    return step + 1 >= arguments.steps


def hang():
    while True:
        time.sleep(0.05)


class Toy:
    def __init__(self):
        token = os.environ.get("TENSORFORGE_TOKEN")
        self.worker = ElasticWorker(WorkerId(NAME, "127.0.0.1", 0), token=token)
        self.log = RunLog.from_environment(NAME)
        self.step = -1
        self.generation = 0

    def form(self):
        """Whether this worker is still a member."""
        while True:
            try:
                event = self.worker.wait_for_rescale(timeout=120)
            except ClosedError:  # released
                return False
            self.generation = event.new_topology.epoch
            if self.worker.worker_id not in event.new_topology:
                self.worker.wait_for_release(30)
                return False
            self.worker.ready(self.generation, committed_step=self.step)
            try:
                formation = self.worker.wait_for_formation(60)
            except StaleGenerationError:
                continue
            self.step = max(self.step, formation.target_step)
            self.worker.formed(self.generation)
            self.log.write("formed", generation=self.generation, committed_step=self.step)
            return True

    def run(self):
        self.worker.connect_to_cluster(os.environ["TENSORFORGE_COORDINATOR"])
        print(f"{NAME} is here", flush=True)
        if not self.form():
            return
        told = False
        while not is_complete(self.step) and not asked_to_stop.is_set():
            misbehave(self.step + 1)
            time.sleep(arguments.seconds)
            if asked_to_leave.is_set() and not told:
                told = True
                self.worker.leave("SIGTERM")
            if self.worker.pending_event is not None:
                if not self.form():
                    print(f"{NAME} was released", flush=True)
                    return
                continue
            self.step += 1
            loss = 1.0 / (self.step + 1)
            self.worker.report_progress(
                self.generation, 0, self.step, 0.1, samples=8, metrics={"loss": loss}
            )
            self.log.write(
                "commit",
                step=self.step,
                epoch=0,
                samples=8,
                learning_rate=0.1,
                metrics={"loss": loss},
            )
        outcome = "complete" if is_complete(self.step) else "stopped"
        self.log.write(
            "final",
            outcome=outcome,
            committed_step=self.step,
            digest="d1",
            proof=f"{arguments.steps} steps of 8 samples",
        )
        print(f"{NAME}: {outcome}", flush=True)
        self.worker.finish(outcome)
        self.worker.flush(60.0)


if __name__ == "__main__":
    toy = Toy()
    try:
        toy.run()
    finally:
        toy.worker.disconnect()
        toy.log.close()
