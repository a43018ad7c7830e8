"""Transfers between real processes, with a proxy on the wire that does harm at an exact byte."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tensorforge.data import DatasetInfo, SampleSchema, ShardStore, pack_array
from tensorforge.data.segments.segment import BLOCK
from tensorforge.storage.local_store import LocalStore

WORKER = str(Path(__file__).with_name("transfer_worker.py"))
ROW, SIZE = 64 * 1024, 160  # ten blocks
INFO = DatasetInfo(size=SIZE, schema=SampleSchema(dtype="|u1", shape=(ROW,)))
BYTES = SIZE * ROW


class Proxy:
    """Forwards connections to `target`; `at(total)` is called with the bytes sent to the client so far."""

    def __init__(self, target):
        self.target = target
        self.at = lambda total, data: data
        self.total = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = []
        self._open = True
        self._spawn(self._accept)

    def _spawn(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while self._open:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            self._spawn(self._pump, client, server, False)
            self._spawn(self._pump, server, client, True)

    def _pump(self, source, sink, to_client):
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                if to_client:
                    data = self.at(self.total, data)
                    self.total += len(data)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def samples():
    return np.random.default_rng(3).integers(0, 256, (SIZE, ROW), dtype=np.uint8)


@pytest.fixture
def scene(tmp_path, samples):
    with Scene(tmp_path, samples) as scene:
        yield scene


class Scene:
    """A source process that holds everything, a proxy before it, and an empty destination."""

    def __init__(self, folder, samples):
        self.folder, self.samples = folder, samples
        self.processes, self.proxies = [], []
        with ShardStore(folder / "source", INFO) as store:
            store.put(0, SIZE, samples)
        ShardStore(folder / "destination", INFO).close()

    def __enter__(self):
        self.source = self.serve()
        self.proxy = self.proxied(self.source)
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()
        for proxy in self.proxies:
            proxy.close()

    def start(self, *words, **options):
        process = subprocess.Popen(
            [sys.executable, WORKER, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.processes.append(process)
        return process

    def serve(self):
        process = self.start("serve", self.folder / "source")
        process.address = tuple(json.loads(process.stdout.readline())["address"])
        return process

    def proxied(self, process):
        proxy = Proxy(process.address)
        self.proxies.append(proxy)
        return proxy

    def begin_fetch(self, *, attempts=4, origin="", folder=None, via=None, **options):
        address = (via or self.proxy).address
        folder = folder or self.folder / "destination"
        return self.start("fetch", folder, *address, 0, SIZE, attempts, origin, **options)

    def fetch(self, **options):
        return self.outcome(self.begin_fetch(**options))

    @staticmethod
    def outcome(process):
        output, _ = process.communicate(timeout=60)
        return json.loads(output)

    def pack_origin(self):
        blobs = LocalStore(self.folder / "origin")
        pack_array(blobs, self.samples, segments=3)
        blobs.close()
        return str(self.folder / "origin")

    def assert_arrived(self, folder=None):
        with ShardStore(folder or self.folder / "destination") as store:
            assert store.held.ranges == ((0, SIZE),)
            assert all(np.array_equal(store[i], self.samples[i]) for i in range(SIZE))
            assert list((store.folder / "incoming").iterdir()) == []

    def assert_source_untouched(self):
        with ShardStore(self.folder / "source") as store:
            store.verify()
            assert store.held.ranges == ((0, SIZE),)


def kill_at(process, position):
    """Kill a process when so many bytes have passed, and let no more of them through."""

    def act(total, data):
        if total + len(data) < position:
            return data
        process.send_signal(signal.SIGKILL)
        process.wait()
        return b""

    return act


def test_a_source_killed_in_mid_transfer_is_replaced_by_the_origin(scene):
    origin = scene.pack_origin()
    scene.proxy.at = kill_at(scene.source, 4 * BLOCK + 1000)
    found = scene.fetch(origin=origin)
    assert found["from_origin"] == 1
    assert found["received"] == BYTES  # what had arrived was not fetched again, nothing came twice
    scene.assert_arrived()


def test_a_source_killed_without_an_origin_fails_with_the_reason_and_nothing_is_lost(scene):
    scene.proxy.at = kill_at(scene.source, 4 * BLOCK + 1000)
    found = scene.fetch(attempts=2)
    assert found["error"] == "TransferError"
    assert "source@127.0.0.1" in found["message"]
    assert found["held"] == []
    scene.assert_source_untouched()
    again = scene.proxied(scene.serve())
    found = scene.fetch(via=again)
    assert found["received"] <= BYTES - 3 * BLOCK
    assert again.total < BYTES - 3 * BLOCK + 10_000
    scene.assert_arrived()


def test_a_destination_killed_in_mid_transfer_goes_on_when_it_comes_back(scene):
    incoming = scene.folder / "destination" / "incoming"
    victims = []

    def act(total, data):
        if total + len(data) >= 5 * BLOCK and victims:
            wait_until(lambda: any(p.stat().st_size > 3 * BLOCK for p in incoming.iterdir()))
            victims.pop().send_signal(signal.SIGKILL)
        return data

    scene.proxy.at = act
    victim = scene.begin_fetch()
    victims.append(victim)
    assert victim.wait(60) == -signal.SIGKILL
    with ShardStore(scene.folder / "destination") as store:
        assert not store.held  # half a shard is not a shard
    found = scene.fetch()
    assert 0 < found["received"] <= BYTES - 3 * BLOCK
    scene.assert_arrived()
    scene.assert_source_untouched()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_chunk_damaged_on_the_wire_is_sent_again(scene):
    done = []

    def act(total, data):
        position = 3 * BLOCK + 12_345
        if not done and total <= position < total + len(data):
            done.append(position)
            damaged = bytearray(data)
            damaged[position - total] ^= 0x10
            return bytes(damaged)
        return data

    scene.proxy.at = act
    found = scene.fetch()
    assert (found["retries"], found["from_origin"], found["received"]) == (1, 0, BYTES)
    scene.assert_arrived()


def test_a_wire_that_damages_everything_fails_with_the_reason(scene):
    def act(total, data):
        return data if len(data) < 1000 else bytes(len(data))

    scene.proxy.at = act
    found = scene.fetch(attempts=3)
    assert found["error"] == "TransferError"
    assert found["held"] == []
    scene.assert_source_untouched()


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * BLOCK, 3 * BLOCK))


def test_a_quota_at_the_destination_fails_the_plan_with_the_reason(scene):
    found = scene.fetch(preexec_fn=limit_file_size)
    assert found["error"] == "TransferError"
    assert "no room for" in found["message"]
    assert found["held"] == []
    assert list((scene.folder / "destination" / "incoming").iterdir()) == []
    scene.assert_source_untouched()
    scene.fetch()
    scene.assert_arrived()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_at_the_destination_fails_the_plan_and_is_not_left_full(scene, small_disk):
    folder = small_disk / "store"
    ShardStore(folder, INFO).close()
    found = scene.fetch(folder=folder)
    assert found["error"] == "TransferError"
    assert "No space left on device" in found["message"]
    assert found["held"] == []
    room = os.statvfs(folder)
    assert room.f_bavail * room.f_frsize > 3 << 20  # what could not be finished was removed
    scene.assert_source_untouched()
