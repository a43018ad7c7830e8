"""A lifecycle as a value: the states that a thing can have, and the transitions between them.

Workers, checkpoints, model versions and memory blocks have one each. A transition that a lifecycle does not
have is a `TransitionError`, which lists those that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from tensorforge.errors import TransitionError

State = TypeVar("State", bound=Enum)


class Lifecycle(Generic[State]):
    """The transitions of a thing that error messages call `name`.

    `transitions` maps each state to the states that may follow it. A state without an entry is final.
    A state follows itself only if it is listed as its own successor.
    """

    __slots__ = ("_successors", "name")

    def __init__(self, name: str, transitions: Mapping[State, Iterable[State]]) -> None:
        self.name = name
        self._successors = {state: tuple(targets) for state, targets in transitions.items()}
        for targets in tuple(self._successors.values()):
            for target in targets:
                self._successors.setdefault(target, ())

    @property
    def states(self) -> tuple[State, ...]:
        """Every state; first those that have successors."""
        return tuple(self._successors)

    def allowed(self, current: State) -> tuple[State, ...]:
        """The states that may follow `current`, in the order of their declaration."""
        return self._successors.get(current, ())

    def can_transition(self, current: State, requested: State) -> bool:
        """Whether `requested` may directly follow `current`."""
        return requested in self.allowed(current)

    def require(self, current: State, requested: State) -> State:
        """Return `requested` if it may directly follow `current`; otherwise raise `TransitionError`."""
        if not self.can_transition(current, requested):
            raise TransitionError(self.name, current, requested, self.allowed(current))
        return requested

    def shortest_path(self, start: State, goal: State) -> tuple[State, ...] | None:
        """The states from `start` to `goal`, both included, with the fewest transitions.

        `None` if no transitions lead there. The path from a state to itself is that state alone. Of paths of
        equal length the result is the one whose transitions were declared first.
        """
        came_from: dict[State, State | None] = {start: None}
        queue = deque([start])
        while queue:
            state = queue.popleft()
            if state == goal:
                return self._walk_back(came_from, state)
            for target in self.allowed(state):
                if target not in came_from:
                    came_from[target] = state
                    queue.append(target)
        return None

    @staticmethod
    def _walk_back(came_from: Mapping[State, State | None], goal: State) -> tuple[State, ...]:
        path = [goal]
        while (previous := came_from[path[-1]]) is not None:
            path.append(previous)
        return tuple(reversed(path))
