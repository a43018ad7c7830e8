"""The record of one rescale: who came and went, why, and how long each phase took."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tensorforge.elastic.protocol.reasons import Departure


class RescalePhase(StrEnum):
    """The phases of a rescale, in order. Each one ends where the next one begins."""

    DETECTION = "detection"
    """From the evidence (a broken stream, the last sign of life) until the coordinator handles it."""
    DECISION = "decision"
    """Until the next generation is in the journal and announced."""
    BARRIER = "barrier"
    """Until every member has stopped."""
    FORMING = "forming"
    """Until every member has formed the new group and is healed."""
    FIRST_COMMIT = "first_commit"
    """Until the first step of the new generation is committed."""

    @property
    def label(self) -> str:
        """The phase as people read it."""
        return self.value.replace("_", " ")


class RescaleRecord(msgspec.Struct, kw_only=True):
    """One rescale. The fields that end in `_ms` are the phases in milliseconds; `None` was not reached (yet).

    `reason` is a text for people; `removed` says of every worker that went why it did. `moved` adds up what the
    members received while they formed, by name.
    """

    generation: int
    type: str
    reason: str
    urgent: bool
    paused: bool
    added: tuple[str, ...]
    removed: dict[str, Departure]
    old_size: int
    new_size: int
    decided_at: str = ""
    detection_ms: float = 0.0
    decision_ms: float | None = None
    barrier_ms: float | None = None
    forming_ms: float | None = None
    first_commit_ms: float | None = None
    moved: dict[str, int] = {}

    @property
    def milliseconds(self) -> dict[RescalePhase, float]:
        """How long each phase took that has ended."""
        times = {phase: getattr(self, f"{phase}_ms") for phase in RescalePhase}
        return {phase: time for phase, time in times.items() if time is not None}

    @property
    def total_ms(self) -> float | None:
        """From the evidence to the first committed step, once that has come."""
        times = self.milliseconds
        return sum(times.values()) if len(times) == len(RescalePhase) else None
