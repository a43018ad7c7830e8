"""A lifecycle is a value: the states of something and the moves between them.

Workers, checkpoints and deployments each have one table of moves; all of them ask it the same
questions, and a refused move is the same error that lists what was allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from tensorforge.errors import TransitionError

State = TypeVar("State", bound=Enum)


class Lifecycle(Generic[State]):
    """The moves that a thing called `name` may make.

    `moves` maps each state to the states that may follow it. A state that is only ever a target
    is final. Staying in a state is a move like any other and must be listed to be legal.
    """

    __slots__ = ("_moves", "name")

    def __init__(self, name: str, moves: Mapping[State, Iterable[State]]) -> None:
        self.name = name
        self._moves: dict[State, tuple[State, ...]] = {s: tuple(t) for s, t in moves.items()}
        for targets in tuple(self._moves.values()):
            for target in targets:
                self._moves.setdefault(target, ())

    @property
    def states(self) -> tuple[State, ...]:
        """Every state, sources first."""
        return tuple(self._moves)

    def allowed(self, current: State) -> tuple[State, ...]:
        """The states that may follow `current`, in the order they were declared."""
        return self._moves.get(current, ())

    def is_final(self, state: State) -> bool:
        """Whether nothing can follow `state`."""
        return not self.allowed(state)

    def can_transition(self, current: State, requested: State) -> bool:
        """Whether the single move from `current` to `requested` exists."""
        return requested in self.allowed(current)

    def require(self, current: State, requested: State) -> State:
        """Return `requested` if the move exists; otherwise raise `TransitionError`."""
        if not self.can_transition(current, requested):
            raise TransitionError(self.name, current, requested, self.allowed(current))
        return requested

    def shortest_path(self, start: State, goal: State) -> tuple[State, ...] | None:
        """The states from `start` to `goal`, both included, with the fewest moves.

        `None` if there is no way. From a state to itself the path is that state alone. Ties go to
        the move that was declared first.
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
