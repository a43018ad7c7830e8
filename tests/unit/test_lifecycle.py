"""Which transitions a lifecycle has, and the shortest way between two states."""

import itertools
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import TransitionError
from tensorforge.lifecycle import Lifecycle


class Door(Enum):
    OPEN = "open"
    SHUT = "shut"
    LOCKED = "locked"
    GONE = "gone"


DOOR = Lifecycle(
    "door",
    {
        Door.OPEN: [Door.SHUT],
        Door.SHUT: [Door.OPEN, Door.LOCKED],
        Door.LOCKED: [Door.SHUT, Door.GONE],
    },
)


def test_only_listed_transitions_are_legal():
    legal = {(a, b) for a in Door for b in Door if DOOR.can_transition(a, b)}
    assert legal == {
        (Door.OPEN, Door.SHUT),
        (Door.SHUT, Door.OPEN),
        (Door.SHUT, Door.LOCKED),
        (Door.LOCKED, Door.SHUT),
        (Door.LOCKED, Door.GONE),
    }


def test_a_state_that_is_only_a_target_is_final():
    assert DOOR.allowed(Door.GONE) == ()
    assert DOOR.allowed(Door.OPEN) == (Door.SHUT,)
    assert set(DOOR.states) == set(Door)


def test_a_refused_transition_says_what_was_allowed():
    with pytest.raises(TransitionError, match="door cannot go from open to locked; allowed: shut"):
        DOOR.require(Door.OPEN, Door.LOCKED)
    with pytest.raises(TransitionError, match="nothing: it is final") as caught:
        DOOR.require(Door.GONE, Door.OPEN)
    assert caught.value.allowed == ()


def test_a_legal_transition_returns_the_new_state():
    assert DOOR.require(Door.OPEN, Door.SHUT) is Door.SHUT


def test_the_shortest_path_has_the_fewest_transitions():
    assert DOOR.shortest_path(Door.OPEN, Door.GONE) == (
        Door.OPEN,
        Door.SHUT,
        Door.LOCKED,
        Door.GONE,
    )
    assert DOOR.shortest_path(Door.OPEN, Door.OPEN) == (Door.OPEN,)
    assert DOOR.shortest_path(Door.GONE, Door.OPEN) is None


@given(st.dictionaries(st.sampled_from(Door), st.lists(st.sampled_from(Door)), max_size=4))
def test_a_path_exists_exactly_if_states_are_reachable_and_every_step_is_legal(transitions):
    machine = Lifecycle("any", transitions)
    for start in Door:
        reachable = {start}
        while more := {t for s in reachable for t in machine.allowed(s)} - reachable:
            reachable |= more
        for goal in Door:
            path = machine.shortest_path(start, goal)
            assert (path is not None) == (goal in reachable)
            if path:
                assert path[0] is start
                assert path[-1] is goal
                assert all(machine.can_transition(a, b) for a, b in itertools.pairwise(path))
                assert len(set(path)) == len(path)
