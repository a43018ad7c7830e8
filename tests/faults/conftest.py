from pathlib import Path

import pytest
from tests.integration.train_cases import make_run, train, work

from tensorforge.cluster.elastic_config import AdaptationStrategy, ElasticTrainingConfig
from tensorforge.testing.training_cluster import TrainingCluster, forking_context

HANG_SECONDS = 300


def pytest_collection_modifyitems(items):
    """A busy machine makes these tests slow, so only what hangs for long is ended."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HANG_SECONDS))


@pytest.fixture(scope="session")
def warm_processes():
    """Start the process that others are forked from before the leak check looks."""
    first = forking_context().Process(target=len, args=("",))
    first.start()
    first.join()


@pytest.fixture
def cluster(warm_processes, tmp_path):
    """Makes a cluster whose workers train one of the test models."""

    def make(kind="mlp", optimizer="adamw", total=60, workers=3, main=None, arguments=None, **more):
        options, settings = more.pop("options", {}), more.pop("settings", {})
        config = {
            "stability_window_ms": 150,
            "worker_heartbeat_timeout_ms": 1500,
            "rescale_timeout_ms": 20_000,
            "failure_tolerance_percentage": 100,
            "max_consecutive_failures": 50,
            "lr_adaptation_strategy": AdaptationStrategy.NONE,
        } | more.pop("config", {})
        return TrainingCluster(
            main or work,
            arguments if main else (kind, optimizer, total, options, settings),
            tmp_path / f"run-{kind}-{more.pop('name', 0)}",
            config=ElasticTrainingConfig(**config),
            desired_workers=workers,
            **more,
        )

    return make


@pytest.fixture(scope="session")
def alone():
    """The digest and losses of an undisturbed run in this process, remembered."""
    known = {}

    def get(kind, optimizer, total, options=(), **settings):
        key = (kind, optimizer, total, tuple(options), tuple(sorted(settings.items())))
        if key not in known:
            known[key] = train(make_run(kind, optimizer, **settings), total, **dict(options))
        return known[key]

    return get
