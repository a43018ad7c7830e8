"""Which errors are tried again, how long the waits are, and which events count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import ConfigurationError, InvalidInputError, UnavailableError
from tensorforge.resilience import RetryPolicy, deduplicate, is_retryable
from tensorforge.testing.clock import ManualClock


class Flaky:
    def __init__(self, failures, error=UnavailableError("away")):
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


def run(policy, operation, share=lambda: 1.0):
    clock = ManualClock()
    return policy.run(operation, sleep=clock.sleep, clock=clock, share=share), clock()


def test_a_retryable_error_is_tried_again_until_it_works():
    policy = RetryPolicy(max_attempts=4, base_delay=1, max_delay=100)
    assert run(policy, Flaky(3)) == ("done", 1 + 2 + 4)


def test_waits_never_exceed_the_ceiling():
    policy = RetryPolicy(max_attempts=6, base_delay=1, max_delay=3)
    assert run(policy, Flaky(5)) == ("done", 1 + 2 + 3 + 3 + 3)


def test_the_jitter_is_full():
    policy = RetryPolicy(max_attempts=2, base_delay=1)
    assert run(policy, Flaky(1), share=lambda: 0.0) == ("done", 0)


def test_the_last_error_is_raised_as_it_is():
    operation = Flaky(9)
    with pytest.raises(UnavailableError) as caught:
        run(RetryPolicy(max_attempts=3), operation)
    assert caught.value is operation.error
    assert operation.calls == 3


def test_an_error_that_cannot_pass_is_not_tried_again():
    operation = Flaky(1, InvalidInputError("wrong"))
    with pytest.raises(InvalidInputError):
        run(RetryPolicy(), operation)
    assert operation.calls == 1
    assert not is_retryable(ValueError())


def test_the_deadline_bounds_the_whole():
    operation = Flaky(99)
    clock = ManualClock()
    policy = RetryPolicy(max_attempts=100, base_delay=1, max_delay=1, deadline=5)
    with pytest.raises(UnavailableError):
        policy.run(operation, sleep=clock.sleep, clock=clock, share=lambda: 1.0)
    assert clock() < 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", True),
        ("base_delay", -1),
        ("base_delay", float("nan")),
        ("max_delay", 0.01),
        ("multiplier", 0.5),
        ("deadline", 0),
    ],
)
def test_a_wrong_policy_is_refused_by_field(field, value):
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy(**{field: value})
    assert caught.value.field == field


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_no_attempt_waits_longer_than_the_policy_allows(attempt, share):
    policy = RetryPolicy(max_attempts=10**6)
    delay = policy.next_delay(attempt, UnavailableError(), 0, share)
    assert 0 <= delay <= policy.max_delay


def test_the_first_of_equal_events_counts():
    events = [("a", 1), ("b", 2), ("a", 3)]
    assert list(deduplicate(events, key=lambda e: e[0])) == [("a", 1), ("b", 2)]


def test_keys_can_be_remembered_between_replays():
    seen: set = set()
    assert list(deduplicate([1, 2], key=lambda e: e, seen=seen)) == [1, 2]
    assert list(deduplicate([2, 3], key=lambda e: e, seen=seen)) == [3]
