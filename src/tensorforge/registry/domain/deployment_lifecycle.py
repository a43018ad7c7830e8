"""The states of a model version, and the transitions between them."""

from __future__ import annotations

from enum import Enum

from tensorforge.lifecycle import Lifecycle


class DeploymentState(Enum):
    """The seven states of a model version."""

    REGISTERED = "registered"
    VALIDATING = "validating"
    STAGING = "staging"
    CANARY = "canary"
    PRODUCTION = "production"
    DEPRECATED = "deprecated"
    ARCHIVED = "archived"


DEPLOYMENT_LIFECYCLE = Lifecycle(
    "model version",
    {
        DeploymentState.REGISTERED: [DeploymentState.VALIDATING],
        DeploymentState.VALIDATING: [DeploymentState.STAGING, DeploymentState.REGISTERED],
        DeploymentState.STAGING: [DeploymentState.CANARY, DeploymentState.REGISTERED],
        DeploymentState.CANARY: [DeploymentState.PRODUCTION, DeploymentState.STAGING],
        DeploymentState.PRODUCTION: [DeploymentState.DEPRECATED],
        DeploymentState.DEPRECATED: [DeploymentState.ARCHIVED],
    },
)
"""The transitions from each state. Where there are two, the second leads back after a failure."""

_NEEDS_EVIDENCE = {
    (DeploymentState.VALIDATING, DeploymentState.STAGING),
    (DeploymentState.CANARY, DeploymentState.PRODUCTION),
}

SERVING_STATES = frozenset({DeploymentState.CANARY, DeploymentState.PRODUCTION})
"""The states in which a version answers requests of users."""


def can_transition_state(current: DeploymentState, requested: DeploymentState) -> bool:
    """Whether the lifecycle has the transition from `current` to `requested`."""
    return DEPLOYMENT_LIFECYCLE.can_transition(current, requested)


def needs_evidence(current: DeploymentState, requested: DeploymentState) -> bool:
    """Whether the transition needs a passing validation that was recorded in `current`."""
    return (current, requested) in _NEEDS_EVIDENCE
