"""Random histories of a real registry, compared with a dictionary that says what must hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.registry.sample_values import S, metadata, result, v

from tensorforge.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
    TensorForgeError,
)
from tensorforge.registry import DeploymentState, ModelRegistry, can_transition_state
from tensorforge.registry.domain.names import check_name, check_tags


@given(st.text(max_size=30), st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
@settings(max_examples=60)
def test_whatever_names_are_accepted_come_back_unchanged(name, tags):
    try:
        check_name("model_id", name)
        check_tags(tags)
    except InvalidInputError:
        return
    with ModelRegistry() as registry:
        registry.register(metadata(model_id=name, tags=tags))
        kept = registry.get(name, v("1.0.0"))
        assert kept is not None
        assert (kept.model_id, kept.tags) == (name, dict(sorted(tags.items())))


class RegistryHistory(RuleBasedStateMachine):
    """Random transitions in a real registry, compared with a dictionary of expected states."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = ModelRegistry()
        self.states: dict[str, DeploymentState] = {}
        self.validated: set[str] = set()

    names = st.sampled_from(["1.0.0", "1.1.0", "2.0.0"])

    @rule(version=names)
    def register(self, version: str) -> None:
        try:
            self.registry.register(metadata(version))
        except AlreadyExistsError:
            assert version in self.states
        else:
            assert version not in self.states
            self.states[version] = S.REGISTERED

    @rule(version=names)
    def validate(self, version: str) -> None:
        try:
            self.registry.record_validation(result(version))
            self.validated.add(version)
        except TensorForgeError:
            assert version not in self.states

    @rule(version=names, requested=st.sampled_from(list(S)))
    def transition(self, version: str, requested: DeploymentState) -> None:
        current = self.states.get(version)
        gate = requested is S.PRODUCTION or (current, requested) == (S.VALIDATING, S.STAGING)
        legal = current is not None and can_transition_state(current, requested)
        may = legal and (not gate or version in self.validated)
        try:
            self.registry.transition_state("ranker", v(version), requested)
        except TensorForgeError:
            assert not may
            return
        assert may
        self.states[version] = requested
        self.validated.discard(version)

    @rule()
    def roll_back(self) -> None:
        serving = [x for x, state in self.states.items() if state is S.PRODUCTION]
        try:
            done = self.registry.rollback("ranker")
        except (ConflictError, LookupError):
            assert len(serving) < 2
            return
        assert len(serving) >= 2
        assert str(done.current) in serving
        self.states[str(done.previous)] = S.DEPRECATED
        self.validated.discard(str(done.previous))

    @invariant()
    def agrees_with_the_model(self) -> None:
        for version, state in self.states.items():
            kept = self.registry.get("ranker", v(version))
            assert kept is not None
            assert kept.state is state
        if self.states:
            production = self.registry.production("ranker")
            serving = {x for x, state in self.states.items() if state is S.PRODUCTION}
            assert (production is None) == (not serving)
            assert production is None or str(production.version) in serving

    def teardown(self) -> None:
        self.registry.verify_audit()
        self.registry.close()


TestRegistryHistory = RegistryHistory.TestCase
TestRegistryHistory.settings = settings(max_examples=25, stateful_step_count=25)
