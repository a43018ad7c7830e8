"""kill -9 in the middle of a compaction: the journal is as it was, or compacted, and says the same."""

import signal
import subprocess
import sys

import pytest
import sqlalchemy as sa

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.elastic.coordinator.journal import ENTRIES, Journal
from tensorforge.storage.database import Database
from tensorforge.testing.process_cluster import ProcessCluster

WRITER = """
import sys, threading
import sqlalchemy as sa
from tensorforge.elastic.coordinator.journal import Journal
from tensorforge.elastic.coordinator.journal_records import TargetSet
from tensorforge.storage.database import Database

url, moment = sys.argv[1:]
database = Database(url)
journal = Journal(database)
journal.open()
journal.append([TargetSet(workers=n, by="me") for n in range(1, 41)])

def stop_here(*_):
    print("here", flush=True)
    threading.Event().wait()

def after_statement(_connection, _cursor, statement, *_):
    if statement.startswith(moment):
        stop_here()

if moment == "COMMIT":
    sa.event.listen(database._engine, "commit", stop_here)
elif moment in ("INSERT", "DELETE"):
    sa.event.listen(database._engine, "after_cursor_execute", after_statement)
journal.compact()
stop_here()
"""


@pytest.mark.parametrize("moment", ["INSERT", "DELETE", "COMMIT", "AFTERWARDS"])
def test_a_kill_during_compaction_loses_nothing(database_url, moment):
    command = [sys.executable, "-c", WRITER, str(database_url), moment]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"here\n"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    with Database(database_url) as database:
        with database.read() as connection:
            count = connection.scalar(sa.select(sa.func.count()).select_from(ENTRIES))
        assert count == (1 if moment == "AFTERWARDS" else 40)
        assert Journal(database).open().desired_workers == 40


def test_a_killed_coordinator_goes_on_from_a_compacted_journal(tmp_path):
    config = ElasticTrainingConfig(
        stability_window_ms=200,
        worker_heartbeat_timeout_ms=3_000,
        failure_tolerance_percentage=100,
    )
    with ProcessCluster(tmp_path, config) as local:
        local.start_coordinator()
        local.start_worker("w0")
        local.start_worker("w1")
        before = local.wait_until_active({"w0", "w1"})
        port = local.kill_coordinator()
        with Database(tmp_path / "journal.db") as database:
            journal = Journal(database)
            journal.open()
            journal.compact()
            journal.release()
            assert len(journal.entries()) == 1
        local.start_coordinator(port)
        step = before.state.step
        local.wait_until(lambda: local.status().state.step > step, "training goes on")
        after = local.status()
        assert after.generation == before.generation
        assert [w.id for w in after.workers] == [w.id for w in before.workers]
        assert [r.reason for r in after.rescales] == [r.reason for r in before.rescales]
