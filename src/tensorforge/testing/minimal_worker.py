"""The smallest training loop: it follows every rescale and commits steps, without tensors.

It runs as a thread beside a test, or as a process (`python -m tensorforge.testing.minimal_worker`) that tests
kill, freeze and disconnect. It needs neither torch nor numpy, so it starts quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from tensorforge import environment
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.protocol.messages import Formation
from tensorforge.elastic.worker.worker import ElasticWorker
from tensorforge.errors import ClosedError, StaleGenerationError, TrainingAbortedError

STEP_SECONDS = 0.02
RELEASE_SECONDS = 30.0


class MinimalTrainingLoop:
    """Commits steps until the run ends; `log` gets one line of JSON for each event."""

    def __init__(
        self,
        worker: ElasticWorker,
        *,
        steps: int | None = None,
        log: TextIO | None = None,
        step_seconds: float = STEP_SECONDS,
    ) -> None:
        self.worker = worker
        self.step = -1
        self.formations: list[Formation] = []
        self.end_reason: str | None = None
        self._steps = steps
        self._step_seconds = step_seconds
        self._log = log
        self._stopped = threading.Event()
        worker.fenced.append(lambda reason: self._write("fenced", reason=reason))
        worker.rescaling_requested.append(
            lambda event: self._write("told", generation=event.new_topology.epoch)
        )

    def stop(self) -> None:
        """End the loop after the current step without telling the coordinator."""
        self._stopped.set()

    def run(self) -> None:
        """Commit steps until the run ends, this worker is released, or `stop` is called."""
        try:
            while not self._stopped.is_set():
                if self._follow_rescales() and not self._train_one_step():
                    return
        except TrainingAbortedError as ended:
            self.end_reason = ended.reason
        except ClosedError as released:
            self.end_reason = str(released)
        self._write("ended", reason=self.end_reason or "stopped")

    def _follow_rescales(self) -> bool:
        """Take part in a rescale if one is announced; return whether this worker is a formed member."""
        event = self.worker.wait_for_rescale(0 if self._is_member() else 0.05)
        if event is None:
            return self._is_member()
        if self.worker.worker_id not in event.new_topology:
            self.worker.wait_for_release(RELEASE_SECONDS)
            raise ClosedError(f"{self.worker.worker_id.id} left")
        self.worker.ready(event.new_topology.epoch, committed_step=self.step)
        with contextlib.suppress(StaleGenerationError):
            formation = self.worker.wait_for_formation()
            if formation is not None:
                self._form(formation)
        return self._is_member()

    def _form(self, formation: Formation) -> None:
        self.step = formation.target_step
        self.worker.formed(formation.generation, moved={"workers": len(formation.newcomers)})
        self.formations.append(formation)
        self._write(
            "formed",
            generation=formation.generation,
            members=list(formation.members),
            newcomers=list(formation.newcomers),
            step=self.step,
            rank=self.worker.metadata().rank,
        )

    def _train_one_step(self) -> bool:
        topology = self.worker.current_topology
        if topology is None:
            return True
        self._stopped.wait(self._step_seconds)
        self.step += 1
        self.worker.report_progress(topology.epoch, 0, self.step, 0.1, samples=self.step)
        if self._steps is not None and self.step >= self._steps:
            self.worker.finish("all steps are done")
            self.worker.flush()
            self.end_reason = "finished"
            self._write("ended", reason="finished")
            return False
        return True

    def _is_member(self) -> bool:
        topology = self.worker.current_topology
        pending = self.worker.pending_event is not None or self.worker.is_rescaling
        return topology is not None and not pending and self.worker.metadata().rank >= 0

    def _write(self, what: str, **facts: Any) -> None:
        if self._log is not None:
            line = {"what": what, "time": time.time(), "pid": os.getpid(), **facts}
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--config", required=True, help="options as JSON")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    config = msgspec.json.decode(options.config, type=ElasticTrainingConfig)
    worker = ElasticWorker(
        WorkerId(options.id, "127.0.0.1", 0), config, token=environment.TOKEN.take()
    )
    with options.log.open("a") as log, worker:
        loop = MinimalTrainingLoop(worker, steps=options.steps, log=log)
        signal.signal(signal.SIGTERM, lambda *_: worker.leave("SIGTERM"))
        worker.connect_to_cluster(options.coordinator)
        loop.run()
    sys.exit(0)


if __name__ == "__main__":
    _main()
