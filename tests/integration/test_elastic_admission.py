"""A stream that breaks the rules is closed; nobody else notices."""

import queue
import time

import grpc
import pytest
from rich.console import Console

from tensorforge.cli.status import render
from tensorforge.elastic import (
    CoordinatorClient,
    ElasticCoordinator,
    ElasticTrainingConfig,
    ElasticWorker,
    WorkerId,
)
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.commands import SERVICE
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.errors import InvalidInputError

CONFIG = ElasticTrainingConfig(worker_heartbeat_timeout_ms=10_000, stability_window_ms=100)


def hello(name, **fields):
    worker = WorkerId(name, "127.0.0.1", 0)
    greeting = messages.Hello(
        protocol=messages.PROTOCOL, worker=worker, incarnation=f"{name}-1", **fields
    )
    return messages.to_bytes(greeting)


class RawStream:
    """A stream that sends any bytes."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.outbox = queue.SimpleQueue()
        self.call = self.channel.stream_stream(f"/{SERVICE}/Join")(iter(self.outbox.get, None))

    def send(self, *data):
        for item in data:
            self.outbox.put(item)

    def answers(self):
        """What the coordinator sent until it closed the stream."""
        try:
            return [bytes(data) for data in self.call]
        except grpc.RpcError:
            return []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.outbox.put(None)
        self.call.cancel()
        self.channel.close()


@pytest.fixture
def coordinator():
    with ElasticCoordinator(CONFIG, desired_workers=2) as opened:
        yield opened


def wait_for(fits):
    while not fits():
        time.sleep(0.02)


def connected(coordinator):
    view = coordinator.status()
    return {worker.id: worker.is_connected for worker in (*view.workers, *view.waiting)}


@pytest.mark.parametrize(
    "second",
    [
        hello("other"),
        b'{"kind":"heartbeat","incarnation":"\xff\xfe"}',
        b"[" * 100_000,
        b"\x00",
        b'{"kind":"hello","generation":9223372036854775807}',
    ],
    ids=["hello", "utf-8", "nesting", "zero", "number"],
)
def test_a_stream_that_breaks_the_rules_is_closed_and_its_worker_lost(coordinator, second):
    honest = ElasticWorker(WorkerId("honest", "127.0.0.1", 0), CONFIG)
    with honest, RawStream(coordinator.address) as stream:
        honest.connect_to_cluster(coordinator.address)
        stream.send(hello("bad"), second)
        answers = stream.answers()
        assert any(b"refused" in answer for answer in answers)
        wait_for(lambda: not connected(coordinator).get("bad", False))
        known = connected(coordinator)
        assert known["honest"]
        assert "other" not in known


def test_hundreds_of_hellos_are_one_hello(coordinator):
    with RawStream(coordinator.address) as stream:
        stream.send(*(hello(f"ghost-{number}") for number in range(400)))
        stream.answers()
    wait_for(lambda: coordinator.counters()[1] == 0)
    view = coordinator.status()
    assert {w.id for w in (*view.workers, *view.waiting)} <= {"ghost-0"}


def test_a_stream_that_does_not_begin_with_a_hello_is_refused(coordinator):
    with RawStream(coordinator.address) as stream:
        stream.send(b'{"kind":"heartbeat","incarnation":"a"}')
        stream.answers()
    wait_for(lambda: coordinator.counters()[1] == 0)
    assert coordinator.status().waiting == []


@pytest.mark.parametrize("generation", [2**63 - 1, 2**53])
def test_a_huge_generation_does_not_drive_the_counter_to_its_end(coordinator, generation):
    greeting = hello("old", generation=generation)
    with RawStream(coordinator.address) as stream:
        stream.send(greeting)
        stream.answers()
    assert coordinator.status().generation <= 1_000_000


@pytest.mark.parametrize("name", ["[/x]", "a\x1b[31m", "a\nb", "<b>", "x" * 300])
def test_a_name_with_control_characters_or_markup_is_refused(name):
    with pytest.raises(InvalidInputError, match=r"id = "):
        WorkerId(name, "127.0.0.1", 0)


def test_status_shows_markup_in_reasons_as_it_is(coordinator):
    with CoordinatorClient(coordinator.address) as client:
        view = client.status()
    view.rescales.append(
        RescaleRecord(
            generation=1,
            type="scale_up",
            reason="it said [/x]",
            urgent=False,
            paused=False,
            added=(),
            removed={},
            old_size=0,
            new_size=1,
            decided_at="",
            detection_ms=0.0,
        )
    )
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(view, 200))
    assert "[/x]" in shown.get()
