"""The goal of a run: how far its script wants to train."""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.errors import InvalidInputError
from tensorforge.validation import whole_number
from tensorforge.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number of steps or a number of epochs, counted from the beginning of the run. One of both is set."""

    steps: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise InvalidInputError("a goal is a number of steps or a number of epochs, not both")
        for name, value in (("steps", self.steps), ("epochs", self.epochs)):
            if value is not None:
                whole_number(name, value, least=0)

    def __str__(self) -> str:
        if self.steps is not None:
            return counted(self.steps, "step")
        return counted(self.epochs or 0, "epoch")

    def is_reached(self, committed_step: int, epoch: int) -> bool:
        """Whether nothing is left to do after `committed_step`; `epoch` is the one of the next step."""
        if self.steps is not None:
            return committed_step + 1 >= self.steps
        return epoch >= (self.epochs or 0)

    def describe_position(self, committed_step: int, epoch: int) -> str:
        """How far a run is that has not reached this goal, such as `step 176 of 3000`."""
        if self.steps is not None:
            return f"step {committed_step + 1} of {self.steps}"
        return f"step {committed_step + 1}, in epoch {epoch + 1} of {self.epochs}"
