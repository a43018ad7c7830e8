import itertools

import pytest

from tensorforge.registry import DEPLOYMENT_LIFECYCLE, DeploymentState, can_transition_state
from tensorforge.registry.domain.deployment_lifecycle import needs_evidence

S = DeploymentState
ALLOWED = {
    (S.REGISTERED, S.VALIDATING),
    (S.VALIDATING, S.STAGING),
    (S.VALIDATING, S.REGISTERED),
    (S.STAGING, S.CANARY),
    (S.STAGING, S.REGISTERED),
    (S.CANARY, S.PRODUCTION),
    (S.CANARY, S.STAGING),
    (S.PRODUCTION, S.DEPRECATED),
    (S.DEPRECATED, S.ARCHIVED),
}


@pytest.mark.parametrize(("current", "requested"), list(itertools.product(S, S)))
def test_exactly_the_nine_moves_exist(current, requested):
    assert can_transition_state(current, requested) == ((current, requested) in ALLOWED)


def test_there_are_seven_states_and_the_archive_is_final():
    assert len(S) == 7
    assert [state for state in S if not DEPLOYMENT_LIFECYCLE.allowed(state)] == [S.ARCHIVED]


def test_only_the_two_gates_need_evidence():
    gates = {pair for pair in itertools.product(S, S) if needs_evidence(*pair)}
    assert gates == {(S.VALIDATING, S.STAGING), (S.CANARY, S.PRODUCTION)}
