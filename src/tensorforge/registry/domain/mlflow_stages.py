"""MLflow's stages: the states that each stands for, and the way from a state into a stage.

A strict move follows the lifecycle. A lenient move may also use edges that MLflow has and the lifecycle has
not: into `Archived` from anywhere, back from `Production` to `Staging` or `None`, and out of `Archived`. The
registry audits such an edge as a `stage_move`, so that it is never mistaken for a transition of the lifecycle.
The edges that need evidence stay the same in both modes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorforge.registry.domain.deployment_lifecycle import DEPLOYMENT_LIFECYCLE, DeploymentState

STAGES = {
    "None": (DeploymentState.REGISTERED, DeploymentState.VALIDATING),
    "Staging": (DeploymentState.STAGING, DeploymentState.CANARY),
    "Production": (DeploymentState.PRODUCTION,),
    "Archived": (DeploymentState.DEPRECATED, DeploymentState.ARCHIVED),
}
"""The states that each of MLflow's stages stands for."""

ENTERED = {
    "None": DeploymentState.REGISTERED,
    "Staging": DeploymentState.STAGING,
    "Production": DeploymentState.PRODUCTION,
    "Archived": DeploymentState.ARCHIVED,
}
"""The state that a version gets when it enters a stage."""

_BY_LOWER = {stage.lower(): stage for stage in STAGES}
_RETIRED = STAGES["Archived"]


class StageMoves(Enum):
    """Which moves between stages MLflow clients may make."""

    STRICT = "strict"
    LENIENT = "lenient"


@dataclass(frozen=True, slots=True)
class Step:
    """One change of state. A `direct` step is no transition of the lifecycle."""

    target: DeploymentState
    direct: bool = False


def stage_of(text: str) -> str | None:
    """The stage that a text names, in any case; `None` if it names none."""
    return _BY_LOWER.get(text.lower())


def steps_into(current: DeploymentState, stage: str, moves: StageMoves) -> tuple[Step, ...] | None:
    """The steps that take a version from its state into a stage; `None` if there is no way.

    A version that is in the stage already needs no step. The shortest way along the lifecycle is taken if there
    is one that does not pass through production.
    """
    if current in STAGES[stage]:
        return ()
    target = ENTERED[stage]
    along = _along_lifecycle(current, target)
    if along is not None or moves is StageMoves.STRICT:
        return along
    if target is DeploymentState.ARCHIVED or current is DeploymentState.PRODUCTION:
        return (Step(target, direct=True),)
    first = Step(DeploymentState.REGISTERED, direct=True)
    rest = _along_lifecycle(DeploymentState.REGISTERED, target)
    return None if rest is None or current not in _RETIRED else (first, *rest)


def _along_lifecycle(current: DeploymentState, target: DeploymentState) -> tuple[Step, ...] | None:
    path = DEPLOYMENT_LIFECYCLE.shortest_path(current, target)
    # A version on its way elsewhere must not serve in between.
    if path is None or DeploymentState.PRODUCTION in path[1:-1]:
        return None
    return tuple(Step(state) for state in path[1:])
