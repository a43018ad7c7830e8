import pytest

from tensorforge.registry.domain.deployment_lifecycle import DEPLOYMENT_LIFECYCLE
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState as S
from tensorforge.registry.domain.mlflow_stages import ENTERED, STAGES, StageMoves, steps_into


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("stage", list(STAGES))
def test_a_lenient_client_reaches_every_stage_and_never_serves_on_the_way(state, stage):
    steps = steps_into(state, stage, StageMoves.LENIENT)
    assert steps is not None
    if state in STAGES[stage]:
        assert steps == ()
        return
    assert steps[-1].target is ENTERED[stage]
    assert S.PRODUCTION not in [step.target for step in steps[:-1]]


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("moves", list(StageMoves))
def test_a_step_that_is_not_direct_is_a_transition_of_the_lifecycle(state, stage, moves):
    for step in steps_into(state, stage, moves) or ():
        assert step.direct or DEPLOYMENT_LIFECYCLE.can_transition(state, step.target)
        assert not (step.direct and moves is StageMoves.STRICT)
        state = step.target


@pytest.mark.parametrize(
    ("state", "stage"),
    [(S.REGISTERED, "Archived"), (S.PRODUCTION, "Staging"), (S.ARCHIVED, "Production")],
)
def test_a_strict_client_cannot_leave_the_lifecycle(state, stage):
    assert steps_into(state, stage, StageMoves.STRICT) is None


def test_production_cannot_be_reached_by_a_direct_step():
    for state in S:
        steps = steps_into(state, "Production", StageMoves.LENIENT)
        assert not any(step.direct and step.target is S.PRODUCTION for step in steps)
