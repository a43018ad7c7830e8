import threading

import pytest

from tensorforge.elastic import ClusterTopology, TopologyHolder, WorkerId
from tensorforge.errors import StaleGenerationError

A = WorkerId("a", "127.0.0.1", 1)


def test_two_threads_lose_no_change_of_the_held_topology():
    holder = TopologyHolder()

    def join_all(prefix):
        for number in range(400):
            holder.update(lambda t, n=number: t.add_worker(WorkerId(f"{prefix}{n}", "h", 1)))

    threads = [threading.Thread(target=join_all, args=(prefix,)) for prefix in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert holder.current.world_size == holder.current.epoch == 800


def test_the_holder_refuses_to_go_back():
    holder = TopologyHolder(ClusterTopology(workers=(A,), epoch=5))
    for stale in (5, 4):
        with pytest.raises(StaleGenerationError, match=f"generation {stale} does not follow 5"):
            holder.replace(ClusterTopology(epoch=stale))
    holder.replace(ClusterTopology(epoch=9))
    assert holder.current.epoch == 9
