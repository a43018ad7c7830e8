import math

import pytest

from tensorforge.elastic import AdaptationStrategy, ElasticTrainingConfig, RedistributionType
from tensorforge.errors import ConfigurationError

WHOLE_NUMBERS = {
    "min_workers": 1,
    "max_workers": 1,
    "rescale_timeout_ms": 0,
    "max_consecutive_failures": 0,
    "stability_window_ms": 0,
    "worker_heartbeat_timeout_ms": 1,
    "failure_tolerance_percentage": 0,
}
NOT_WHOLE = [1.0, 1.5, math.nan, math.inf, True, False, "1", [1]]

WRONG = [
    *((name, value, "whole number") for name in WHOLE_NUMBERS for value in NOT_WHOLE),
    *((name, None, "whole number") for name in WHOLE_NUMBERS if name != "max_workers"),
    *((name, least - 1, f"at least {least}") for name, least in WHOLE_NUMBERS.items()),
    ("failure_tolerance_percentage", 101, "at most 100"),
    ("lr_adaptation_strategy", "linear", "one of AdaptationStrategy.LINEAR"),
    ("lr_adaptation_strategy", RedistributionType.INCREMENTAL, "one of AdaptationStrategy"),
    ("lr_adaptation_strategy", None, "one of AdaptationStrategy"),
    ("redistribution_type", "incremental", "one of RedistributionType.FULL_RESHUFFLE"),
    *(
        (name, value, "True or False")
        for name in ("use_synchronous_rescaling", "use_parallel_data_transfer")
        for value in (0, 1, None, "yes")
    ),
]


@pytest.mark.parametrize(("field", "value", "rule"), WRONG)
def test_a_wrong_value_is_refused_with_field_value_and_rule(field, value, rule):
    with pytest.raises(ConfigurationError) as caught:
        ElasticTrainingConfig(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert rule in caught.value.rule
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


def test_the_maximum_must_not_lie_below_the_minimum():
    with pytest.raises(ConfigurationError, match=r"max_workers = 2: .*min_workers \(3\)"):
        ElasticTrainingConfig(min_workers=3, max_workers=2)


@pytest.mark.parametrize(("field", "least"), WHOLE_NUMBERS.items())
def test_the_smallest_legal_value_is_accepted(field, least):
    assert getattr(ElasticTrainingConfig(**{field: least}), field) == least


def test_the_defaults_are_the_specifications():
    config = ElasticTrainingConfig()
    assert config == ElasticTrainingConfig(
        min_workers=1,
        max_workers=None,
        rescale_timeout_ms=30_000,
        max_consecutive_failures=3,
        lr_adaptation_strategy=AdaptationStrategy.LINEAR,
        redistribution_type=RedistributionType.FULL_RESHUFFLE,
        use_synchronous_rescaling=True,
        stability_window_ms=30_000,
        worker_heartbeat_timeout_ms=10_000,
        failure_tolerance_percentage=20,
        use_parallel_data_transfer=True,
    )


def test_validate_finds_what_was_forced_in_later():
    config = ElasticTrainingConfig()
    object.__setattr__(config, "min_workers", 0)
    with pytest.raises(ConfigurationError, match="min_workers"):
        config.validate()
