import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import ConfigurationError
from tensorforge.launch.chaos.storm import (
    Candidates,
    Strike,
    StrikeKind,
    choose_victim,
    parse_kinds,
    plan_storm,
)


def test_the_same_seed_gives_the_same_storm():
    one = plan_storm(seed=7, duration=60.0, rate=0.5)
    assert one == plan_storm(seed=7, duration=60.0, rate=0.5)
    assert one != plan_storm(seed=8, duration=60.0, rate=0.5)


def test_a_storm_is_the_same_on_every_machine():
    plan = plan_storm(seed=1, duration=10.0, rate=0.5)
    assert [(round(strike.at, 3), strike.kind.value) for strike in plan.strikes] == [
        (3.031, "join"),
        (4.505, "leave"),
        (8.182, "coordinator-kill"),
    ]


@given(
    st.integers(0, 2**63),
    st.floats(0.1, 200),
    st.floats(0.01, 3),
    st.sets(st.sampled_from(StrikeKind), min_size=1),
)
def test_strikes_come_in_order_within_the_time_and_of_the_kinds_asked_for(
    seed, duration, rate, kinds
):
    plan = plan_storm(seed=seed, duration=duration, rate=rate, kinds=kinds, freeze_seconds=2.0)
    times = [strike.at for strike in plan.strikes]
    assert times == sorted(times)
    for strike in plan.strikes:
        assert 0 <= strike.at < duration
        assert strike.kind in kinds
        assert 0 <= strike.pick < 1
        assert (1.0 <= strike.hold <= 3.0) == (strike.kind is StrikeKind.FREEZE)


def test_the_rate_is_met_on_average():
    count = sum(len(plan_storm(seed=s, duration=100.0, rate=0.3).strikes) for s in range(100))
    assert 2800 < count < 3200


@pytest.mark.parametrize(
    "wrong", [{"duration": 0.0}, {"rate": -1.0}, {"rate": float("inf")}, {"kinds": ()}]
)
def test_a_storm_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        plan_storm(**{"seed": 1, "duration": 1.0, "rate": 1.0, **wrong})


def test_kinds_are_read_by_name():
    assert parse_kinds("freeze, kill") == (StrikeKind.KILL, StrikeKind.FREEZE)
    assert parse_kinds("all") == tuple(StrikeKind)
    with pytest.raises(ConfigurationError, match="coordinator-kill"):
        parse_kinds("kil")


def strike(kind: StrikeKind, pick: float = 0.5) -> Strike:
    return Strike(at=0.0, kind=kind, pick=pick)


def candidates(**changes) -> Candidates:
    facts = {
        "members": ("a", "b", "c"),
        "local": ("a", "b"),
        "min_workers": 2,
        "max_workers": 4,
        "wanted": 3,
        "coordinator_is_local": True,
    }
    return Candidates(**{**facts, **changes})


def test_a_kill_hits_only_what_can_be_reached():
    assert choose_victim(strike(StrikeKind.KILL, 0.99), candidates()).name == "b"
    assert (
        "on this machine" in choose_victim(strike(StrikeKind.FREEZE), candidates(local=())).refusal
    )
    assert choose_victim(strike(StrikeKind.LEAVE, 0.99), candidates()).name == "c"


def test_a_storm_stays_within_the_limits():
    assert "minimum" in choose_victim(strike(StrikeKind.KILL), candidates(min_workers=3)).refusal
    assert "maximum" in choose_victim(strike(StrikeKind.JOIN), candidates(wanted=4)).refusal
    assert choose_victim(strike(StrikeKind.JOIN), candidates(max_workers=None)).name == "4"


def test_the_coordinator_is_hit_only_where_its_process_is_known():
    assert choose_victim(strike(StrikeKind.COORDINATOR_KILL), candidates()).name == "coordinator"
    far = candidates(coordinator_is_local=False)
    assert choose_victim(strike(StrikeKind.COORDINATOR_KILL), far).name is None


@given(st.sampled_from(StrikeKind), st.floats(0, 1, exclude_max=True), st.integers(0, 6))
def test_every_strike_has_a_victim_or_a_reason(kind, pick, count):
    names = tuple(f"w{n}" for n in range(count))
    found = choose_victim(strike(kind, pick), candidates(members=names, local=names, wanted=count))
    assert (found.name is None) == (found.refusal is not None)
    if kind in (StrikeKind.KILL, StrikeKind.FREEZE, StrikeKind.LEAVE) and found.name:
        assert found.name in names
