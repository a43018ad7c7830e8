"""Decides when to save: after a number of steps or seconds, or at the interval that wastes least time. Pure.

That interval is the one of Young and Daly. Saving more often costs more time than it protects; saving less
often loses more work to failures than it gains. The interval follows from two measured values: how long a
save stops training, and the mean time between failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensorforge.errors import ConfigurationError, InvalidInputError
from tensorforge.validation import finite_number


def young_daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """The seconds of work between two saves that waste the least time (Daly's higher-order estimate).

    With cost d and mean time between failures M: `sqrt(2dM) * (1 + sqrt(d/2M)/3 + (d/2M)/9) - d` for d < 2M,
    and M otherwise.
    """
    for name, value in (("save_seconds", save_seconds), ("mtbf_seconds", mtbf_seconds)):
        finite_number(name, value, above=0)
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def estimate_mtbf(failures: int, observed_seconds: float, prior_seconds: float = 86_400.0) -> float:
    """The mean time between failures, from the number of failures in `observed_seconds`.

    The estimate assumes one more failure in `prior_seconds`, which observation soon outweighs; without it a run
    without failures would have an infinite mean time.
    """
    if failures < 0 or not observed_seconds >= 0 or not prior_seconds > 0:
        raise InvalidInputError(
            f"failures = {failures}, observed_seconds = {observed_seconds}, prior_seconds = "
            f"{prior_seconds}: the first two must not be negative, the last must be positive"
        )
    return (observed_seconds + prior_seconds) / (failures + 1)


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """Whether a checkpoint is due, and why. The truth value is `due`."""

    due: bool
    reason: str

    def __bool__(self) -> bool:
        return self.due


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The position of training, in steps and in monotonic seconds, now and at the last checkpoint.

    `save_seconds` is how long the last saves stopped training, without their work in the background.
    `failures` is the number of failures in `observed_seconds`.
    """

    step: int
    now: float
    last_step: int = 0
    last_time: float = 0.0
    save_seconds: float | None = None
    failures: int = 0
    observed_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSchedule:
    """When a checkpoint is due: as soon as one of the rules that are set says so.

    `every_steps`, `every_seconds`: after this many steps or seconds. `optimal`: at the Young-Daly interval,
    limited by `min_seconds` and `max_seconds`; the first save, before one was measured, is due after
    `min_seconds`.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    optimal: bool = False
    min_seconds: float = 10.0
    max_seconds: float = 3_600.0

    def __post_init__(self) -> None:
        if self.every_steps is not None and not self.every_steps >= 1:
            raise ConfigurationError("every_steps", self.every_steps, "must be at least 1")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise ConfigurationError("every_seconds", self.every_seconds, "must be positive")
        if not 0 <= self.min_seconds <= self.max_seconds:
            rule = f"must be between 0 and max_seconds ({self.max_seconds})"
            raise ConfigurationError("min_seconds", self.min_seconds, rule)
        if self.every_steps is None and self.every_seconds is None and not self.optimal:
            rule = "one of every_steps, every_seconds and optimal must be set"
            raise ConfigurationError("every_steps", None, rule)

    def should_checkpoint(self, progress: TrainingProgress) -> ScheduleDecision:
        """Whether a checkpoint is due. None is due before the first step after the last checkpoint."""
        steps = progress.step - progress.last_step
        seconds = progress.now - progress.last_time
        if steps <= 0:
            return ScheduleDecision(False, "no step was made since the last checkpoint")
        if self.every_steps is not None and steps >= self.every_steps:
            return ScheduleDecision(
                True, f"{steps} steps passed, every {self.every_steps} asked for"
            )
        if self.every_seconds is not None and seconds >= self.every_seconds:
            return ScheduleDecision(
                True, f"{seconds:.1f} s passed, every {self.every_seconds:g} s asked for"
            )
        if self.optimal:
            return self._at_optimum(progress, seconds)
        return ScheduleDecision(False, f"{steps} steps and {seconds:.1f} s passed: not yet")

    def optimal_seconds(self, progress: TrainingProgress) -> float:
        """The interval of the rule `optimal`, from the measurements so far."""
        if not progress.save_seconds:
            return self.min_seconds
        mtbf = estimate_mtbf(progress.failures, progress.observed_seconds)
        interval = young_daly_interval(progress.save_seconds, mtbf)
        return min(self.max_seconds, max(self.min_seconds, interval))

    def _at_optimum(self, progress: TrainingProgress, seconds: float) -> ScheduleDecision:
        interval = self.optimal_seconds(progress)
        if not progress.save_seconds:
            basis = "no save was measured yet"
        else:
            mtbf = estimate_mtbf(progress.failures, progress.observed_seconds)
            basis = f"a save costs {progress.save_seconds:.2f} s, failures come every {mtbf:.0f} s"
        return ScheduleDecision(
            seconds >= interval, f"{seconds:.1f} s passed, {interval:.1f} s are optimal: {basis}"
        )
