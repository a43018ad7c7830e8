"""The record of a committed step: training writes it, the launcher shows it, the chaos checks compare it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from tensorforge.encoding import Json
from tensorforge.validation import is_number, is_whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """One optimizer step that all members of a generation have applied.

    `samples`: how many samples all members together consumed in this step. A source may not know all
    fields: generation 0 and a learning rate of NaN mean unknown. `is_skipped`: the samples are consumed, but
    loss scaling found that the gradient was not finite, and nothing was updated.
    """

    step: int
    epoch: int = 0
    generation: int = 0
    samples: int = 0
    learning_rate: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_skipped: bool = False

    @property
    def loss(self) -> float | None:
        """The metric that is called `loss`, if there is one."""
        return self.metrics.get("loss")

    def to_json(self) -> dict[str, Json]:
        """The fields of a line in the run log."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Json]) -> CommittedStep | None:
        """Read a line of the run log; `None` if its `step` is not a whole number.

        Metrics that are not numbers are left out. Other fields of a wrong type get their default.
        """
        step, metrics = line.get("step"), line.get("metrics")
        if not is_whole_number(step):
            return None
        found = metrics if isinstance(metrics, dict) else {}
        return cls(
            step=step,
            epoch=_integer(line.get("epoch")),
            generation=_integer(line.get("generation")),
            samples=_integer(line.get("samples")),
            learning_rate=_number(line.get("learning_rate")),
            metrics={name: _number(value) for name, value in found.items() if is_number(value)},
            is_skipped=line.get("is_skipped") is True,
        )


def _integer(value: Json) -> int:
    return value if is_whole_number(value) else 0


def _number(value: Json) -> float:
    """Every NaN becomes the same object, so that two equal steps compare equal."""
    is_known = is_number(value) and not math.isnan(value)
    return float(value) if is_known else math.nan
