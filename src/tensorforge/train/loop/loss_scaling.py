"""Loss scaling for training in half precision, as a part of the commit.

The loss is multiplied by a scale before the backward pass, so that small gradients survive in half
precision, and the summed gradient is divided by it before it is clipped and applied. If the sum is not
finite, no member applies the step and the scale shrinks; after a number of applied steps it grows. The
decision is taken from the sum, which is the same on all members, so all of them apply the step or none does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorforge.train.run_config import LossScaling


class LossScale:
    """The scale of the next step, and how it follows from the steps before. Without settings it stays 1."""

    def __init__(self, settings: LossScaling | None) -> None:
        self._settings = settings
        self.value = 1.0 if settings is None else settings.initial
        self._applied_in_a_row = 0

    def unscale(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Divide the summed gradients by the scale, in place; return whether all of them are finite."""
        if self._settings is None or not gradients:
            return True
        factor = 1.0 / self.value
        flags = []
        for gradient in gradients:
            gradient.mul_(factor)
            flags.append(torch.isfinite(gradient).all())
        return bool(torch.stack(flags).all())

    def advance(self, *, applied: bool) -> None:
        """Set the scale of the next step, after one that was applied or skipped."""
        if self._settings is None:
            return
        if not applied:
            self.value *= self._settings.backoff
            self._applied_in_a_row = 0
            return
        self._applied_in_a_row += 1
        if self._applied_in_a_row == self._settings.growth_interval:
            self.value *= self._settings.growth
            self._applied_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """The scale and the number of applied steps since it last changed."""
        return {"scale": self.value, "applied_in_a_row": self._applied_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.value = state["scale"]
        self._applied_in_a_row = state["applied_in_a_row"]
