"""What counts as alive, and who may lead."""

import contextlib
import signal
import sqlite3
import time

import pytest

from tensorforge.elastic import ElasticCoordinator, ElasticTrainingConfig
from tensorforge.errors import ConflictError
from tensorforge.testing.process_cluster import ProcessCluster

CONFIG = ElasticTrainingConfig(
    stability_window_ms=200,
    worker_heartbeat_timeout_ms=900,
    rescale_timeout_ms=30_000,
    failure_tolerance_percentage=100,
)
HOLD_THE_LOCK = """
import ctypes, signal
from tensorforge.testing import minimal_worker
def hold(*_):
    ctypes.PyDLL(None).sleep(3)  # a C call that keeps the interpreter lock
signal.signal(signal.SIGUSR1, hold)
minimal_worker._main()
"""


def test_a_worker_whose_interpreter_is_held_for_long_is_alive(tmp_path):
    with ProcessCluster(tmp_path, CONFIG, desired_workers=2) as local:
        local.start_coordinator()
        local.start_worker("free")
        script = tmp_path / "holder.py"
        script.write_text(HOLD_THE_LOCK)
        local.start_worker("holder", module=(str(script),))
        generation = local.wait_until_active({"free", "holder"}).generation
        seen = len(local.workers["holder"].events())
        local.workers["holder"].signal(signal.SIGUSR1)
        time.sleep(3.5)  # more than three heartbeat timeouts
        assert local.status().generation == generation
        assert set(local.members()) == {"free", "holder"}
        assert len(local.workers["holder"].events()) == seen


def test_a_second_coordinator_waits_for_the_lease_and_the_first_is_fenced(tmp_path):
    journal = tmp_path / "journal.db"
    with ElasticCoordinator(CONFIG, database=journal, run_id="r") as leader:
        with pytest.raises(ConflictError, match="is led by process"):
            ElasticCoordinator(CONFIG, database=journal, run_id="r", lease_seconds=5).start()
        assert leader.status().phase == "gathering"


def freeze_between_transactions(process, journal):
    """Stop the process, but not while it holds the lock of the journal's file."""
    while True:
        process.send_signal(signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(journal, timeout=0.2)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.rollback()
                return
            except sqlite3.OperationalError:
                process.send_signal(signal.SIGCONT)
                time.sleep(0.1)


def test_a_frozen_coordinator_that_wakes_up_can_no_longer_decide(tmp_path):
    with ProcessCluster(tmp_path, CONFIG, desired_workers=1) as local:
        local.start_coordinator()
        worker = local.start_worker("w")
        local.wait_until_active({"w"})
        frozen = local.coordinator
        freeze_between_transactions(frozen, tmp_path / "journal.db")
        with ElasticCoordinator(
            CONFIG, database=tmp_path / "journal.db", lease_wait=30, lease_seconds=5
        ) as successor:
            worker.signal(signal.SIGKILL)
            frozen.send_signal(signal.SIGCONT)
            assert frozen.wait(30) == 1
            log = (tmp_path / "coordinator.log").read_text()
            assert "does not lead run 'default' any more" in log
            assert successor.status().generation >= 1
