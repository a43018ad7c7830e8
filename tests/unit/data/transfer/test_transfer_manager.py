"""Servers and managers in one process, over real sockets on loopback."""

import contextlib
import os
import socket
import threading
import time

import numpy as np
import pytest

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import (
    DataRedistributor,
    DatasetInfo,
    DataShard,
    DataTransfer,
    DataTransferManager,
    HostBuffers,
    IntervalSet,
    PackedDataset,
    SampleSchema,
    ShardServer,
    ShardStore,
    pack_array,
    partition,
)
from tensorforge.data.segments.segment import BLOCK, HEADER, segment_name
from tensorforge.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    StaleGenerationError,
    TransferCancelledError,
    TransferError,
)
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.memory_store import MemoryStore

ROW = 64 * 1024
SIZE = 120  # samples of 64 KiB: shards of ten make streams of some blocks
INFO = DatasetInfo(size=SIZE, schema=SampleSchema(dtype="|u1", shape=(ROW,)))
IMPATIENT = RetryPolicy(max_attempts=3, base_delay=0.0, max_delay=0.0)
ME = WorkerId("me", "127.0.0.1", 1)
REDISTRIBUTOR = DataRedistributor(
    ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL)
)


@pytest.fixture(scope="module")
def samples():
    return np.random.default_rng(7).integers(0, 256, (SIZE, ROW), dtype=np.uint8)


@pytest.fixture
def place(tmp_path, samples):
    """Opens stores, servers and managers, and closes them afterwards."""
    with Place(tmp_path, samples) as place:
        yield place


class Place:
    def __init__(self, folder, samples):
        self.folder, self.samples, self.opened = folder, samples, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for thing in reversed(self.opened):
            thing.close()

    def keep(self, thing):
        self.opened.append(thing)
        return thing

    def store(self, name, *ranges):
        store = self.keep(ShardStore(self.folder / name, INFO))
        for start, stop in ranges:
            store.put(start, stop, self.samples[start:stop])
        return store

    def source(self, name, *ranges, **options):
        """A worker that serves these ranges: its id and its server."""
        options = {"generation": 1, **options}
        server = self.keep(ShardServer(self.store(name, *ranges), **options))
        return WorkerId(name, *server.address), server

    def manager(self, store, **options):
        options = {"worker": ME, "generation": 1, "retry": IMPATIENT, "timeout": 5.0, **options}
        return self.keep(DataTransferManager(options.pop("at_once", 4), store=store, **options))

    def origin(self):
        blobs = MemoryStore()
        pack_array(blobs, self.samples, segments=5)
        return PackedDataset(blobs)


def plan_for(sources, shards=None, generation=1):
    """Everything that `sources` hold goes to ME."""
    workers = [worker for worker, _ in sources]
    before = ClusterTopology(workers=workers, epoch=generation - 1)
    ownership = {worker: IntervalSet.of(ranges) for worker, ranges in sources}
    return REDISTRIBUTOR.calculate_plan(
        before, before.succeed([ME]), SIZE, ownership=ownership, departing=workers
    )


def move(source, start, stop, priority=0):
    return DataTransfer(
        source_worker=source,
        destination_worker=ME,
        shard=DataShard(0, start, stop),
        priority=priority,
    )


def same(store, samples, start, stop):
    return all(np.array_equal(store[index], samples[index]) for index in range(start, stop))


def test_a_plan_brings_every_sample_from_its_holder(place, samples):
    one, _ = place.source("one", (0, 40), (40, 60))
    two, _ = place.source("two", (60, 120))
    store = place.store("mine")
    plan = plan_for([(one, [(0, 60)]), (two, [(60, 120)])])
    report = place.manager(store).execute(plan)
    assert store.held == IntervalSet.span(SIZE)
    assert same(store, samples, 0, SIZE)
    assert (report.samples, report.bytes_received) == (SIZE, SIZE * ROW)
    assert (report.retries, report.from_origin, report.already_held) == (0, 0, 0)


def test_a_range_that_is_no_whole_segment_is_cut_out(place, samples):
    source, _ = place.source("one", (0, 37), (37, 81))
    store = place.store("mine")
    place.manager(store).transfer(move(source, 30, 50))
    assert store.held == IntervalSet(((30, 50),))
    assert same(store, samples, 30, 50)


def test_what_is_here_already_is_not_fetched_again(place):
    source, server = place.source("one", (0, 120))
    store = place.store("mine")
    manager = place.manager(store)
    plan = plan_for([(source, [(0, 120)])])
    manager.execute(plan)
    sent = server.bytes_sent
    assert manager.execute(plan).already_held == len(plan.transfers)
    assert server.bytes_sent == sent


def test_transfers_without_a_living_source_come_from_the_origin(place, samples):
    store = place.store("mine")
    report = place.manager(store, origin=place.origin()).transfer(move(None, 10, 90))
    assert same(store, samples, 10, 90)
    assert report.from_origin == 1


def test_a_source_that_cannot_give_is_replaced_by_the_origin(place, samples):
    source, _ = place.source("one", (0, 10))
    store = place.store("mine")
    report = place.manager(store, origin=place.origin()).transfer(move(source, 20, 40))
    assert same(store, samples, 20, 40)
    assert report.from_origin == 1


def test_without_an_origin_the_reason_is_told(place):
    source, _ = place.source("one", (0, 10))
    store = place.store("mine")
    with pytest.raises(TransferError, match="does not contain the samples 20-40") as caught:
        place.manager(store).transfer(move(source, 20, 40))
    assert len(caught.value.failures) == 1
    with pytest.raises(TransferError, match="no origin store"):
        place.manager(store).transfer(move(None, 20, 40))
    gone = WorkerId("gone", "127.0.0.1", 9)
    with pytest.raises(TransferError, match="cannot connect to gone"):
        place.manager(store).transfer(move(gone, 20, 40))


def test_one_failure_does_not_stop_the_others(place, samples):
    source, _ = place.source("one", (0, 60))
    store = place.store("mine")
    plan = plan_for([(source, [(0, 60)])])  # the rest is nobody's, and there is no origin
    with pytest.raises(TransferError, match=r"1 of 2 transfers failed: .*from the origin"):
        place.manager(store).execute(plan)
    assert same(store, samples, 0, 60)


@pytest.mark.parametrize(("mine", "theirs"), [("right", "wrong"), (None, "right"), ("right", None)])
def test_a_stranger_is_refused_whichever_side_it_is_on(place, mine, theirs):
    source, _ = place.source("one", (0, 10), token=theirs)
    store = place.store("mine")
    with pytest.raises(TransferError, match="does not know this job's token") as caught:
        place.manager(store, token=mine, origin=place.origin()).transfer(move(source, 0, 10))
    assert isinstance(next(iter(caught.value.failures.values())), AuthenticationError)
    assert not store.held


def test_the_token_opens_the_door_and_never_travels(place, samples):
    heard = []

    class Listening(ShardServer):
        def _answer(self, connection):
            receive = connection.receive_bytes

            def listen(count):
                data = receive(count)
                heard.append(data)
                return data

            connection.receive_bytes = listen
            super()._answer(connection)

    server = place.keep(Listening(place.store("one", (0, 10)), generation=1, token="secret"))
    store = place.store("mine")
    place.manager(store, token="secret").transfer(move(WorkerId("one", *server.address), 0, 10))
    assert same(store, samples, 0, 10)
    assert heard
    assert b"secret" not in b"".join(heard)


def test_beyond_loopback_a_token_is_required(place):
    with pytest.raises(ConfigurationError, match=r"must be set to serve shards on 0\.0\.0\.0"):
        ShardServer(place.store("one"), host="0.0.0.0")


def test_an_older_generation_is_fenced_off(place):
    source, server = place.source("one", (0, 10), generation=5)
    store = place.store("mine")
    with pytest.raises(TransferError, match="is of generation 4; this server is at 5") as caught:
        place.manager(store, generation=4, origin=place.origin()).transfer(move(source, 0, 10))
    assert isinstance(next(iter(caught.value.failures.values())), StaleGenerationError)
    with pytest.raises(StaleGenerationError):
        server.advance(4)


def test_a_source_that_has_not_heard_of_the_generation_is_asked_again(place, samples):
    source, server = place.source("one", (0, 10), generation=1)
    store = place.store("mine")
    patient = RetryPolicy(max_attempts=1000, base_delay=0.01, max_delay=0.01)
    manager = place.manager(store, generation=2, retry=patient)
    job = manager.launch([move(source, 0, 10)])
    while not job.retries:
        time.sleep(0.001)
    server.advance(2)
    job.wait(10)
    assert same(store, samples, 0, 10)


def test_a_plan_of_an_older_generation_is_refused_and_a_newer_one_is_adopted(place):
    source, _ = place.source("one", (0, 120), generation=3)
    manager = place.manager(place.store("mine"), generation=2)
    with pytest.raises(StaleGenerationError, match="of generation 1; this worker is at 2"):
        manager.start(plan_for([(source, [(0, 120)])], generation=1))
    manager.execute(plan_for([(source, [(0, 120)])], generation=3))
    assert manager.generation == 3


def test_another_data_set_is_not_fetched(place, tmp_path):
    other = DatasetInfo(size=SIZE + 1, schema=INFO.schema)
    store = place.keep(ShardStore(tmp_path / "other", other))
    source, _ = place.source("one", (0, 10))
    with pytest.raises(
        TransferError, match="has a data set of 121 samples, this server has one of 120"
    ):
        place.manager(store).transfer(move(source, 0, 10))


class Recorder(ShardServer):
    """A server that records what it served, in order, and waits at a gate before it sends."""

    def __init__(self, *arguments, **options):
        self.order, self.at_once = [], 0
        self.gate = threading.Event()
        self.gate.set()
        super().__init__(*arguments, **options)

    def _send_chunks(self, connection, stream, offset, generation):
        with self._lock:
            self.order.append(stream.read(0, 16).tobytes())
            self.at_once += 1
        self.gate.wait(10)
        try:
            super()._send_chunks(connection, stream, offset, generation)
        finally:
            with self._lock:
                self.at_once -= 1


@pytest.fixture
def recorder(place):
    server = place.keep(Recorder(place.store("one", (0, 120)), generation=1))
    yield WorkerId("one", *server.address), server
    server.gate.set()


def test_the_most_urgent_comes_first(place, recorder, samples):
    source, server = recorder
    manager = place.manager(place.store("mine"), at_once=1)
    moves = [move(source, 10 * n, 10 * n + 10, priority=n) for n in (3, 11, 0, 7)]
    plan = plan_for([(source, [(0, 120)])])
    object.__setattr__(plan, "transfers", tuple(moves))
    manager.execute(plan)
    assert server.order == [samples[10 * n][:16].tobytes() for n in (11, 7, 3, 0)]


class CountingStore(ShardStore):
    """A store that counts the ranges it receives at the same time, as the receiving side sees them."""

    def __init__(self, *arguments):
        self.receiving, self.most = set(), 0
        super().__init__(*arguments)

    def receive(self, start, stop):
        part = super().receive(start, stop)
        with self._lock:
            self.receiving.add(part)
            self.most = max(self.most, len(self.receiving))
        return part

    def forget_part(self, part):
        super().forget_part(part)
        with self._lock:
            self.receiving.discard(part)


@pytest.mark.parametrize(("parallel", "expected"), [(True, 3), (False, 1)])
def test_so_many_at_once_and_no_more(place, recorder, parallel, expected):
    source, server = recorder
    config = ElasticTrainingConfig(use_parallel_data_transfer=parallel)
    store = place.keep(CountingStore(place.folder / "mine", INFO))
    manager = place.manager(store, at_once=3, config=config)
    server.gate.clear()
    job = manager.launch([move(source, 10 * n, 10 * n + 10) for n in range(12)])
    while server.at_once < expected:
        time.sleep(0.001)
    server.gate.set()
    job.wait(30)
    assert store.most == expected


def test_a_slow_transfer_does_not_hold_the_others_up(place, recorder):
    slow, server = recorder
    quick, _ = place.source("quick", (0, 10))
    manager = place.manager(place.store("mine"), at_once=2)
    server.gate.clear()
    job = manager.launch([move(slow, 50, 60), *(move(quick, n, n + 1) for n in range(10))])
    job.wait_for(0, 10, 30)
    assert [move.source_worker for move, future in job.futures.items() if not future.done()] == [
        slow
    ]
    server.gate.set()
    job.wait(10)


def test_a_cancelled_plan_stops_at_once_and_keeps_what_it_has(place, recorder, samples):
    source, server = recorder
    store = place.store("mine")
    manager = place.manager(store, at_once=1)
    job = manager.launch([move(source, 0, 10), move(source, 10, 20), move(source, 20, 30)])
    job.wait_for(0, 10, 10)
    server.gate.clear()
    while not job.futures[job.moves[2]].running() and not job.futures[job.moves[1]].running():
        time.sleep(0.001)
    job.cancel()
    with pytest.raises(TransferCancelledError, match="of 3 transfers are not done"):
        job.wait(10)
    server.gate.set()
    assert same(store, samples, 0, 10)
    manager.transfer(move(source, 10, 30))
    assert same(store, samples, 0, 30)


def test_a_new_generation_does_not_wait_for_a_source_that_hangs(place, samples):
    class Hanging:
        """Hangs where the first call of all waits for its shard, until it is let go."""

        def __init__(self, origin):
            self._origin = origin
            self.is_reached, self.gate = threading.Event(), threading.Event()

        def open_range(self, start, stop):
            if not self.is_reached.is_set():
                self.is_reached.set()
                self.gate.wait()
            return self._origin.open_range(start, stop)

    origin, store = Hanging(place.origin()), place.store("mine")
    manager = place.manager(store, origin=origin, at_once=1)
    late = manager.start(plan_for([]))
    assert origin.is_reached.wait(10)
    manager.start(plan_for([], generation=2)).wait(10)
    assert same(store, samples, 0, SIZE)
    origin.gate.set()
    with pytest.raises(TransferCancelledError):
        late.wait(10)
    store.verify()


def test_training_waits_only_for_the_samples_it_needs(place, recorder, samples):
    source, server = recorder
    store = place.store("mine")
    server.gate.clear()
    job = place.manager(store).launch([move(source, 0, 10), move(source, 50, 60)])
    job.wait_for(20, 40)
    with pytest.raises(DeadlineExceededError, match=r"\[5, 6\) did not arrive"):
        job.wait_for(5, 6, timeout=0.05)
    with pytest.raises(DeadlineExceededError, match="not done"):
        job.wait(timeout=0.01)
    server.gate.set()
    job.wait_for(5, 6, timeout=10)
    assert same(store, samples, 0, 10)
    job.wait(10)


def test_an_advanced_server_stops_serving_the_old_generation_in_mid_transfer(place, recorder):
    source, server = recorder
    server.gate.clear()
    job = place.manager(place.store("mine")).launch([move(source, 0, 100)])
    while not server.at_once:
        time.sleep(0.001)
    server.advance(2)
    server.gate.set()
    with pytest.raises(TransferError, match="is of generation 1; this server is at 2"):
        job.wait(10)


def test_a_transfer_goes_on_from_the_last_verified_chunk(place, samples):
    source, server = place.source("one", (0, 120))
    store = place.store("mine")
    body = samples[0:120].reshape(-1)
    with store.receive(0, 120) as part:
        part.begin(body.nbytes)
        part.append(body[:BLOCK].tobytes())
        part.append(body[BLOCK : 2 * BLOCK].tobytes())
    report = place.manager(store).transfer(move(source, 0, 120))
    assert report.bytes_received == server.bytes_sent == body.nbytes - 2 * BLOCK
    assert same(store, samples, 0, 120)


def test_a_beginning_that_is_not_the_sources_is_thrown_away(place, samples):
    for origin in (None, place.origin()):
        source, _ = place.source(f"one-{origin is None}", (0, 120))
        store = place.store(f"mine-{origin is None}")
        with store.receive(0, 120) as part:
            part.begin(SIZE * ROW)
            part.append(bytes(BLOCK))
        transfer = move(source if origin is None else None, 0, 120)
        report = place.manager(store, origin=origin).transfer(transfer)
        assert report.bytes_received == SIZE * ROW
        assert same(store, samples, 0, 120)


def test_the_origin_goes_on_where_a_dead_peer_stopped(place, samples):
    store = place.store("mine")
    body = samples.reshape(-1)
    with store.receive(0, 120) as part:
        part.begin(body.nbytes)
        part.append(body[:BLOCK].tobytes())
    gone = WorkerId("gone", "127.0.0.1", 9)
    report = place.manager(store, origin=place.origin()).transfer(move(gone, 0, 120))
    assert report.bytes_received == body.nbytes - BLOCK
    assert same(store, samples, 0, 120)


def test_a_source_whose_file_rotted_is_found_out_and_replaced(place, samples):
    source, server = place.source("one", (0, 120))
    path = server._store.folder / "segments" / segment_name(0, 120)
    with path.open("r+b") as file:
        file.seek(HEADER.size + 3 * BLOCK + 5)
        file.write(bytes([samples.reshape(-1)[3 * BLOCK + 5] ^ 255]))
    store = place.store("mine")
    with pytest.raises(TransferError, match=rf"chunk at {3 * BLOCK} .* arrived damaged"):
        place.manager(store).transfer(move(source, 0, 120))
    assert not store.held
    report = place.manager(store, origin=place.origin()).transfer(move(source, 0, 120))
    assert report.from_origin == 1
    assert same(store, samples, 0, 120)


def test_a_source_whose_file_was_cut_short_breaks_off_and_goes_on_serving_others(place, samples):
    source, server = place.source("one", (0, 60), (60, 120))
    path = server._store.folder / "segments" / segment_name(0, 60)
    os.truncate(path, HEADER.size + 2 * BLOCK)
    store = place.store("mine")
    with pytest.raises(TransferError, match="closed the connection"):
        place.manager(store).transfer(move(source, 0, 60))
    place.manager(store).transfer(move(source, 60, 120))
    assert same(store, samples, 60, 120)
    report = place.manager(store, origin=place.origin()).transfer(move(source, 0, 60))
    assert (report.from_origin, report.bytes_received) == (1, 60 * ROW - 2 * BLOCK)
    assert same(store, samples, 0, 60)


def test_senders_wait_while_the_memory_for_chunks_is_used_up(place, samples):
    source, server = place.source("one", (0, 120))
    buffers = HostBuffers(2 * BLOCK)
    store = place.store("mine")
    manager = place.manager(
        store, at_once=4, buffers=buffers, retry=RetryPolicy(max_attempts=1), timeout=30.0
    )
    lent = [buffers.acquire(BLOCK, 0.0) for _ in range(2)]
    job = manager.launch([move(source, 10 * n, 10 * n + 10) for n in range(12)])
    with pytest.raises(DeadlineExceededError):
        job.wait(0.05)
    assert server.bytes_sent == 0
    for handle in lent:
        handle.free()
        handle.free()
    job.wait(30)
    assert buffers.lent_bytes == 0
    assert buffers.peak_bytes <= 2 * BLOCK  # twelve transfers, four at once, two buffers
    assert same(store, samples, 0, 120)


def test_noise_on_the_port_harms_nobody(place, samples):
    source, server = place.source("one", (0, 10), timeout=0.5)
    for noise in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00hello" * 9,
    ):
        with socket.create_connection(server.address) as sock, contextlib.suppress(OSError):
            sock.settimeout(5)
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    store = place.store("mine")
    place.manager(store).transfer(move(source, 0, 10))
    assert same(store, samples, 0, 10)


def test_a_crowd_is_served_a_few_at_a_time(place, samples):
    source, _ = place.source("one", (0, 120), max_connections=1)
    store = place.store("mine")
    patient = RetryPolicy(max_attempts=10_000, base_delay=0.001, max_delay=0.001)
    manager = place.manager(store, retry=patient)
    manager.launch([move(source, 10 * n, 10 * n + 10) for n in range(12)]).wait(60)
    assert same(store, samples, 0, 120)


def test_silent_connections_do_not_keep_peers_out(place, samples):
    source, _ = place.source("one", (0, 120), max_connections=2)
    store = place.store("mine")
    patient = RetryPolicy(max_attempts=10_000, base_delay=0.01, max_delay=0.01)
    address = source.hostname, source.port
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(address))
        began = time.monotonic()
        place.manager(store, retry=patient).transfer(move(source, 0, 10))
        assert time.monotonic() - began < 9  # the server's own timeout is 10 s
    assert same(store, samples, 0, 10)


def test_the_measured_rate_feeds_the_next_plans_estimates(place):
    source, _ = place.source("one", (0, 120))
    manager = place.manager(place.store("mine"))
    assert manager.samples_per_second() is None
    manager.transfer(move(source, 0, 120))
    assert manager.samples_per_second() > 0


def test_a_manager_carries_only_its_own_workers_transfers(place):
    manager = place.manager(place.store("mine"))
    foreign = DataTransfer(
        source_worker=None,
        destination_worker=WorkerId("other", "h", 1),
        shard=DataShard(0, 0, 1),
    )
    with pytest.raises(ConfigurationError, match="this manager is me@"):
        manager.transfer(foreign)
    with pytest.raises(StaleGenerationError):
        manager.transfer(move(None, 0, 1), generation=0)
    manager.close()
    with pytest.raises(ClosedError):
        manager.transfer(move(None, 0, 1))


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_the_window_is_a_positive_number(place, wrong):
    with pytest.raises(ConfigurationError, match="max_concurrent_transfers"):
        place.manager(place.store("mine"), at_once=wrong)


def test_the_redistributor_moves_single_shards_through_the_manager(place, samples):
    source, _ = place.source("one", (0, 20))
    store = place.store("mine")
    redistributor = DataRedistributor(ElasticTrainingConfig(), place.manager(store))
    redistributor.transfer_data_shards(source, ME, partition(SIZE, 12)[1])
    assert same(store, samples, 10, 20)
