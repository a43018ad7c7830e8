"""What `make demo` runs."""

from tensorforge.elastic import AdaptationStrategy, ClusterTopology, WorkerId, adapt_learning_rate


def main() -> None:
    topology = ClusterTopology()
    for name in ("anna", "ben", "cleo"):
        topology = topology.add_worker(WorkerId(name, "127.0.0.1", 0))
        rate = adapt_learning_rate(0.1, 1, topology.world_size, AdaptationStrategy.LINEAR)
        print(f"generation {topology.epoch}: {topology.world_size} workers, learning rate {rate:g}")


if __name__ == "__main__":
    main()
