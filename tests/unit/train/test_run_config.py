import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic import AdaptationStrategy
from tensorforge.errors import ConfigurationError
from tensorforge.train.run_config import RunConfig


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 1, "shards": 0}, "shards"),
        ({"batch_size": 1, "seed": -1}, "seed"),
        ({"batch_size": 1, "accumulation": 0}, "accumulation"),
        ({"batch_size": 1, "clip_grad_norm": 0.0}, "clip_grad_norm"),
        ({"batch_size": 1, "clip_grad_norm": float("nan")}, "clip_grad_norm"),
        ({"batch_size": 1, "schedule_every": "day"}, "schedule_every"),
        ({"batch_size": 1, "strategy": "linear"}, "strategy"),
        ({"batch_size": 1, "metrics": ("loss",)}, "metrics"),
        ({"batch_size": 1, "base_workers": 0}, "base_workers"),
    ],
)
def test_a_bad_setting_is_named(settings, field):
    with pytest.raises(ConfigurationError) as caught:
        RunConfig(**settings)
    assert caught.value.field == field


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 1000))
def test_a_steps_samples_are_spread_evenly(shards, batch, step):
    amounts = RunConfig(batch_size=batch, shards=shards).amounts(step, batch)
    assert sum(amounts) == batch
    assert max(amounts) - min(amounts) <= 1


@given(st.integers(1, 12), st.integers(1, 50))
def test_over_time_all_shards_give_the_same(shards, batch):
    config = RunConfig(batch_size=batch, shards=shards)
    rows = [config.amounts(step, batch) for step in range(shards)]
    totals = [sum(row[shard] for row in rows) for shard in range(shards)]
    assert max(totals) - min(totals) <= 1


def test_only_without_adaptation_the_batch_stays():
    none = RunConfig(batch_size=24)
    linear = RunConfig(batch_size=24, strategy=AdaptationStrategy.LINEAR)
    assert none.global_batch(5, 2) == 24
    assert linear.global_batch(5, 2) == 60
    assert linear.global_batch(1, 2) == 12
