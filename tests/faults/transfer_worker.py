"""One side of a transfer as a process of its own: `serve FOLDER`, or `fetch FOLDER HOST PORT START STOP`."""

import contextlib
import json
import sys

from tensorforge.cluster.workers import WorkerId
from tensorforge.data import (
    DataShard,
    DataTransfer,
    DataTransferManager,
    PackedDataset,
    ShardServer,
    ShardStore,
)
from tensorforge.errors import TensorForgeError
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.opening import open_store


def say(**facts):
    print(json.dumps(facts), flush=True)


def serve(folder):
    with ShardStore(folder) as store, ShardServer(store, generation=1, token="job") as server:
        say(address=server.address)
        sys.stdin.read()


def fetch(folder, host, port, start, stop, attempts, origin):
    me = WorkerId("destination", "127.0.0.1", 1)
    transfer = DataTransfer(
        source_worker=WorkerId("source", host, int(port)),
        destination_worker=me,
        shard=DataShard(0, int(start), int(stop)),
    )
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(ShardStore(folder))
        packed = None
        if origin:
            blobs = open_store(origin)
            stack.callback(blobs.close)
            packed = PackedDataset(blobs)
        manager = stack.enter_context(
            DataTransferManager(
                worker=me,
                store=store,
                origin=packed,
                generation=1,
                token="job",
                timeout=20.0,
                retry=RetryPolicy(max_attempts=int(attempts), base_delay=0.01, max_delay=0.05),
            )
        )
        try:
            report = manager.transfer(transfer)
        except TensorForgeError as error:
            say(error=type(error).__name__, message=str(error), held=store.held.ranges)
        else:
            store.verify()
            say(
                received=report.bytes_received,
                retries=report.retries,
                from_origin=report.from_origin,
                held=store.held.ranges,
            )


if __name__ == "__main__":
    {"serve": serve, "fetch": fetch}[sys.argv[1]](*sys.argv[2:])
