"""A database connection that is cut between COMMIT and its answer: the decision is in the journal once."""

import asyncio
import contextlib
import socket
import socketserver
import threading
import urllib.request

import pytest
import sqlalchemy as sa

from tensorforge.elastic import ElasticCoordinator, ElasticTrainingConfig
from tensorforge.elastic.coordinator.journal import Journal
from tensorforge.elastic.coordinator.journal_records import TargetSet
from tensorforge.errors import ClosedError, UnavailableError
from tensorforge.storage.database import Database

CONFIG = ElasticTrainingConfig(worker_heartbeat_timeout_ms=2_000)


class CommitCutter:
    """A proxy in front of PostgreSQL. Once armed, it forwards COMMIT, discards the answer and hangs up."""

    def __init__(self, url):
        self.target = f"{url.query['host']}/.s.PGSQL.{url.port or 5432}"
        self.armed = threading.Event()
        self.cuts = 0
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                proxy.serve(self.request)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.url = url.set(
            host="127.0.0.1", port=self.server.server_address[1], query={"sslmode": "disable"}
        )

    def serve(self, client):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
            server.connect(self.target)
            cut = threading.Event()
            back = threading.Thread(target=self.copy_back, args=(server, client, cut))
            back.start()
            while not cut.is_set() and (data := client.recv(65536)):
                if self.armed.is_set() and b"COMMIT" in data:
                    self.armed.clear()
                    self.cuts += 1
                    cut.set()
                server.sendall(data)
            if not cut.is_set():
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    @staticmethod
    def copy_back(server, client, cut):
        with contextlib.suppress(OSError):
            while (data := server.recv(65536)) and not cut.is_set():
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def cutter(postgres_url):
    with CommitCutter(sa.make_url(postgres_url)) as proxy:
        yield proxy


@pytest.fixture
def database(cutter):
    with Database(cutter.url.render_as_string(hide_password=False)) as opened:
        yield opened


def test_an_append_whose_answer_is_lost_is_recognised_as_written(cutter, database):
    journal = Journal(database)
    journal.open()
    journal.append([TargetSet(workers=1, by="me")])
    entry = TargetSet(workers=2, by="me")
    cutter.armed.set()
    with pytest.raises(UnavailableError):
        journal.append([entry])
    journal.append([entry])
    journal.append([TargetSet(workers=3, by="me")])
    assert [e.workers for e in journal.entries()] == [1, 2, 3]
    assert Journal(database).check() == 3
    assert cutter.cuts == 1


def test_a_compaction_whose_answer_is_lost_is_followed_by_the_next_append(cutter, database):
    journal = Journal(database)
    journal.open()
    journal.append([TargetSet(workers=1, by="me")])
    cutter.armed.set()
    with pytest.raises(UnavailableError):
        journal.compact()
    journal.append([TargetSet(workers=2, by="me")])
    journal.release()
    assert Journal(database).open().desired_workers == 2


def test_a_coordinator_leads_on_after_a_lost_answer(cutter, database):
    with ElasticCoordinator(CONFIG, database=database) as coordinator:
        cutter.armed.set()
        for workers in range(1, 5):
            coordinator.scale(workers)
        assert coordinator.status().desired_workers == 4
    assert cutter.cuts == 1


@pytest.mark.parametrize("task", ["_decide", "_renew", "_report_alive"])
def test_a_coordinator_whose_task_dies_steps_down(tmp_path, monkeypatch, task):
    from tensorforge.elastic.coordinator.control_server import ControlServer

    async def dying(_self):
        await asyncio.sleep(1.0)
        raise RuntimeError("a bug")

    monkeypatch.setattr(ControlServer, task, dying)
    with Database(tmp_path / "j.db") as database:
        first = ElasticCoordinator(CONFIG, database=database, metrics_port=0)
        with first:
            with pytest.raises(RuntimeError, match="a bug"):
                first.wait_until_ended(60)
            with pytest.raises(RuntimeError, match="a bug"):
                first.require_running()
            with pytest.raises(ClosedError):
                first.status()
        monkeypatch.undo()
        with ElasticCoordinator(CONFIG, database=database) as second:
            second.scale(2)


def test_healthz_follows_the_decisions(monkeypatch):
    from tensorforge.elastic.coordinator import coordinator_metrics

    def health(coordinator):
        try:
            with urllib.request.urlopen(f"http://{coordinator.metrics_address}/healthz") as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    with ElasticCoordinator(CONFIG, metrics_port=0) as coordinator:
        assert health(coordinator) == (200, "ok\n")
        monkeypatch.setattr(coordinator_metrics, "HEALTHY_SECONDS", -1.0)
        code, text = health(coordinator)
        assert code == 503
        assert "nothing was decided for" in text
