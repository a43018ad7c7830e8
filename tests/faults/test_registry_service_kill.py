"""What the service has acknowledged is there, however it ended; and no caller pays for another's mistake."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
from tests.integration.registry_server import running_server

from tensorforge.registry import ModelRegistry

API = "/api/2.0/mlflow"
CALLERS = 16


class Caller:
    """One connection that stays open."""

    def __init__(self, server):
        self._connection = http.client.HTTPConnection(
            server.url.removeprefix("http://"), timeout=30
        )
        self._headers = {
            "Authorization": f"Bearer {server.token}",
            "Content-Type": "application/json",
        }

    def post(self, path, body):
        self._connection.request("POST", f"{API}/{path}", json.dumps(body), self._headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())

    def close(self):
        self._connection.close()


def test_sixteen_callers_who_want_the_same_name_get_one_model_and_fifteen_errors(database_url):
    barrier = threading.Barrier(CALLERS)
    with running_server(database_url) as server, ThreadPoolExecutor(CALLERS) as pool:

        def call(number):
            with contextlib.closing(Caller(server)) as caller:
                barrier.wait()
                same = caller.post("registered-models/create", {"name": "wanted"})
                own = caller.post("registered-models/create", {"name": f"own-{number}"})
                wrong = caller.post("registered-models/create", {"name": "../wrong"})
                made = caller.post(
                    "model-versions/create", {"name": "wanted", "source": f"s3://b/{number}"}
                )
                return same, own, wrong, made

        same, own, wrong, made = zip(*pool.map(call, range(CALLERS)), strict=True)
    assert sorted(status for status, _ in same) == [200] + [409] * (CALLERS - 1)
    losers = [body["error_code"] for status, body in same if status != 200]
    assert set(losers) == {"RESOURCE_ALREADY_EXISTS"}
    assert {status for status, _ in own} == {200}
    assert {body["error_code"] for _, body in wrong} == {"INVALID_PARAMETER_VALUE"}
    numbers = sorted(int(body["model_version"]["version"]) for _, body in made)
    assert numbers == list(range(1, CALLERS + 1))
    with ModelRegistry(database_url) as registry:
        assert registry.model_count() == CALLERS + 1
        assert registry.verify_audit().sequence == 2 * CALLERS + 1


def create_until_the_server_is_gone(server, number, acknowledged):
    """Names of models; those that were answered, and the one that was under way."""
    with contextlib.closing(Caller(server)) as caller:
        for count in range(1_000_000):
            name = f"m-{number}-{count}"
            try:
                status, _ = caller.post("registered-models/create", {"name": name})
            except (OSError, http.client.HTTPException):
                return name
            assert status == 200
            acknowledged.append(name)
    raise AssertionError("nobody ended the server")


def kill(server):
    main = psutil.Process(server.pid)
    for process in [*main.children(recursive=True), main]:
        os.kill(process.pid, signal.SIGKILL)


def test_creates_that_were_acknowledged_survive_a_kill_in_the_middle(database_url):
    acknowledged: list[str] = []
    with running_server(database_url) as server, ThreadPoolExecutor(CALLERS) as pool:
        under_way = [
            pool.submit(create_until_the_server_is_gone, server, number, acknowledged)
            for number in range(CALLERS)
        ]
        deadline = time.monotonic() + 60
        while len(acknowledged) < 20 * CALLERS and time.monotonic() < deadline:
            time.sleep(0.005)
        kill(server)
        unknown = {each.result() for each in under_way}
    assert len(acknowledged) >= 20 * CALLERS
    with ModelRegistry(database_url) as registry:
        stored = {entry.model_id for entry in all_history(registry)}
        assert stored >= set(acknowledged)
        assert stored <= set(acknowledged) | unknown
        assert registry.verify_audit().sequence == registry.model_count() == len(stored)


def all_history(registry):
    after = 0
    while page := registry.history(after=after, limit=1_000):
        yield from page
        after = page[-1].sequence
