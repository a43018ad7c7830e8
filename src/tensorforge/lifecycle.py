"""A lifecycle as a value: the states of something, and the transitions between them.

Workers, checkpoints and model versions each have one. A transition that a lifecycle does not have is a
`TransitionError`, which lists the transitions that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from tensorforge.errors import TransitionError

State = TypeVar("State", bound=Enum)


class Lifecycle(Generic[State]):
    """The transitions that a thing called `name` may make.

    `transitions` maps each state to the states that may follow it. A state that only follows others
    is final. A transition from a state to itself must be listed like any other.
    """

    __slots__ = ("_transitions", "name")

    def __init__(self, name: str, transitions: Mapping[State, Iterable[State]]) -> None:
        self.name = name
        self._transitions: dict[State, tuple[State, ...]] = {
            state: tuple(targets) for state, targets in transitions.items()
        }
        for targets in tuple(self._transitions.values()):
            for target in targets:
                self._transitions.setdefault(target, ())

    @property
    def states(self) -> tuple[State, ...]:
        """Every state, sources first."""
        return tuple(self._transitions)

    def allowed(self, current: State) -> tuple[State, ...]:
        """The states that may follow `current`, in the order they were declared."""
        return self._transitions.get(current, ())

    def is_final(self, state: State) -> bool:
        """Whether nothing can follow `state`."""
        return not self.allowed(state)

    def can_transition(self, current: State, requested: State) -> bool:
        """Whether the lifecycle has the transition from `current` to `requested`."""
        return requested in self.allowed(current)

    def require(self, current: State, requested: State) -> State:
        """Return `requested` if the transition exists; otherwise raise `TransitionError`."""
        if not self.can_transition(current, requested):
            raise TransitionError(self.name, current, requested, self.allowed(current))
        return requested

    def shortest_path(self, start: State, goal: State) -> tuple[State, ...] | None:
        """The states from `start` to `goal`, both included, with the fewest transitions.

        `None` if there is no path. From a state to itself the path is that state alone. Ties go to
        the transition that was declared first.
        """
        came_from: dict[State, State | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            if state == goal:
                return self._path_to(came_from, state)
            for target in self.allowed(state):
                if target not in came_from:
                    came_from[target] = state
                    queue.append(target)
        return None

    @staticmethod
    def _path_to(came_from: Mapping[State, State | None], goal: State) -> tuple[State, ...]:
        path = [goal]
        while (previous := came_from[path[-1]]) is not None:
            path.append(previous)
        return tuple(reversed(path))
