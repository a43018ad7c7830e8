import pytest

from tensorforge.errors import ConfigurationError
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 0),
        ("workers", 1.5),
        ("min_workers", 0),
        ("min_workers", 5),
        ("max_workers", 2),
        ("standbys", -1),
        ("max_restarts", -1),
        ("hang_timeout", 0.0),
        ("stop_timeout", -1.0),
        ("restart_window", float("nan")),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    settings = {"workers": 3, "min_workers": 2, field: value}
    with pytest.raises(ConfigurationError, match="must be"):
        SupervisionPolicy(**settings)


def test_the_number_of_workers_stays_within_its_limits():
    policy = SupervisionPolicy(workers=3, min_workers=2, max_workers=4)
    assert [policy.clamp(n) for n in (0, 2, 3, 9)] == [2, 2, 3, 4]
    assert SupervisionPolicy().clamp(1000) == 1000
