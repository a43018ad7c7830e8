"""One sender process on loopback and every way to receive what it has; iperf3 beside them."""

import json
import multiprocessing
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import (
    DataRedistributor,
    DatasetInfo,
    DataTransferManager,
    SampleSchema,
    ShardServer,
    ShardStore,
    partition,
)

MIB = 1 << 20
SHARDS = 8
STREAMS = 4
SAMPLE = 65536


def serve(folder: str, pipe: Connection) -> None:
    """The sending side of all ways, until it is told to end."""
    store = ShardStore(folder)
    files = sorted((Path(folder) / "segments").iterdir())
    listener = socket.create_server(("127.0.0.1", 0))
    total = sum(file.stat().st_size for file in files)
    with ShardServer(store, generation=1) as server, listener:
        pipe.send((server.address, listener.getsockname()))
        block = bytes(MIB)
        while True:
            connection, _ = listener.accept()
            with connection:
                wish = connection.recv(1)
                if wish == b"m":
                    for _ in range(total // MIB):
                        connection.sendall(block)
                elif wish == b"f":
                    for path in files:
                        with path.open("rb", buffering=0) as file:
                            while data := file.read(MIB):
                                connection.sendall(data)
                else:
                    return


class Loopback:
    """`megabytes` in shards with a sender; each way to fetch them answers how many bytes came."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.megabytes = folder, megabytes
        rows = megabytes * MIB // SAMPLE
        self.info = DatasetInfo(size=rows, schema=SampleSchema(dtype="|u1", shape=(SAMPLE,)))
        generator = np.random.default_rng(0)
        with ShardStore(folder / "source", self.info) as store:
            for shard in partition(rows, SHARDS):
                data = generator.integers(0, 256, (shard.size, SAMPLE), dtype=np.uint8)
                store.put(shard.start_index, shard.end_index, data)
        here, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=serve, args=(str(folder / "source"), there))
        self.process.start()
        address, self.plain = here.recv()
        self.me, source = WorkerId("me", "127.0.0.1", 1), WorkerId("source", *address)
        old = ClusterTopology(workers=(source,))
        config = ElasticTrainingConfig(redistribution_type=RedistributionType.INCREMENTAL)
        self.plan = DataRedistributor(config).calculate_shard_plan(
            old, old.succeed((self.me,)), partition(rows, SHARDS), departing=(source,)
        )

    def close(self) -> None:
        with socket.create_connection(self.plain) as sock:
            sock.sendall(b"q")
        self.process.join()

    def _receive(self, wish: bytes) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(MIB))
        with socket.create_connection(self.plain) as sock:
            sock.sendall(wish)
            while count := sock.recv_into(buffer):
                yield buffer[:count]

    def memory_to_memory(self) -> int:
        return sum(len(data) for data in self._receive(b"m"))

    def file_to_file(self) -> int:
        total = 0
        with (self.folder / "plain").open("wb", buffering=0) as file:
            for data in self._receive(b"f"):
                total += file.write(data)
        return total

    def ours(self, streams: int = STREAMS) -> int:
        with (
            ShardStore(self.folder / "arrived", self.info) as store,
            DataTransferManager(streams, worker=self.me, store=store, generation=1) as manager,
        ):
            return manager.execute(self.plan).bytes_received

    def rate(self, way: Callable[[], int]) -> float:
        """Megabytes per second; what an earlier way has written is removed first."""
        shutil.rmtree(self.folder / "arrived", ignore_errors=True)
        (self.folder / "plain").unlink(missing_ok=True)
        started = time.perf_counter()
        total = way()
        return total / (time.perf_counter() - started) / 1e6


def has_iperf3() -> bool:
    return shutil.which("iperf3") is not None


def iperf3(megabytes: int, streams: int) -> float:
    """What iperf3 itself says: megabytes per second, received, from memory to memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            return _iperf3_client(port, megabytes, streams)
        finally:
            server.terminate()


def _iperf3_client(port: str, megabytes: int, streams: int) -> float:
    wish = ["-n", f"{megabytes}M", "-P", str(streams), "-J"]
    command = ["iperf3", "-c", "127.0.0.1", "-p", port, *wish]
    for _ in range(100):
        found = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
        if "error" not in found:
            return float(found["end"]["sum_received"]["bits_per_second"]) / 8e6
        time.sleep(0.05)  # the server is still on its way up
    raise RuntimeError(f"iperf3: {found['error']}")
