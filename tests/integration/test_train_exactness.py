"""The same bits on any number of processes: real processes, real gloo."""

import pytest
from tests.integration.train_cases import make_run, train, train_fixed

from tensorforge.testing.training_cluster import forking_context


@pytest.fixture(scope="session")
def processes():
    """Start the process that others are forked from before the leak check looks."""
    context = forking_context()
    first = context.Process(target=len, args=("",))
    first.start()
    first.join()
    return context


CASES = [
    pytest.param("mlp", "sgd", {}, {}, (2, 3, 4, 5), id="mlp, SGD with momentum"),
    pytest.param(
        "transformer", "adamw", {}, {}, (2, 3, 4, 5), id="transformer with dropout, AdamW"
    ),
    pytest.param("convnet", "sgd", {}, {}, (2, 3, 4, 5), id="convnet with batch norm, SGD"),
    pytest.param("mlp", "adamw", {}, {}, (3,), id="mlp, AdamW"),
    pytest.param("transformer", "sgd", {}, {"bf16": True}, (3,), id="bf16 autocast"),
    pytest.param("convnet", "adamw", {"accumulation": 2}, {}, (4,), id="batch norm, accumulated"),
    pytest.param(
        "mlp", "adamw", {"shards": 3, "batch_size": 7}, {}, (5,), id="more workers than shards"
    ),
    pytest.param(
        "transformer", "adamw", {"bucket_bytes": 600}, {}, (2, 3, 5), id="transformer, sent early"
    ),
    pytest.param("convnet", "sgd", {"bucket_bytes": 256}, {}, (2, 4), id="batch norm, sent early"),
    pytest.param(
        "mlp", "sgd", {"shuffle": "within_shards"}, {}, (3,), id="shuffled within the shards"
    ),
]


@pytest.mark.parametrize(("kind", "optimizer", "settings", "options", "sizes"), CASES)
def test_the_weights_are_the_same_on_any_number_of_processes(
    processes, kind, optimizer, settings, options, sizes
):
    alone = train(make_run(kind, optimizer, **settings), 9, **options)
    for size in sizes:
        assert (
            train_fixed(processes, size, kind, optimizer, options=options, **settings)
            == [alone] * size
        )
