"""Why a worker leaves, who asked for a number of workers, and how a run ends: as values.

Code decides by these values. People read `str(departure)`; the sentences are written here and nowhere else.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from tensorforge.wording import counted


class Requester(StrEnum):
    """What kind of client asked for a number of workers."""

    LAUNCHER = "launcher"
    """The launcher computes its number from one that it has seen, so a newer number wins over it."""
    OPERATOR = "operator"
    """A person or a program whose newest number counts."""


class RunOutcome(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    STOPPED = "stopped"


class DepartureKind(StrEnum):
    """What made a worker leave the cluster."""

    FAILED = "failed"
    """The coordinator took the worker for dead."""
    LEFT = "left"
    """The worker asked to leave."""
    REMOVED = "removed"
    """A client asked for this worker to leave."""
    SURPLUS = "surplus"
    """Fewer workers are wanted than there were."""
    UNKNOWN = "unknown"
    """A journal without kinds names the departure; `detail` is its sentence."""


class Departure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why one worker leaves.

    `by` names the client that asked, `workers` is the number that made the worker surplus. `target_version`
    is the version of the wanted number of workers at that moment: a number of a later version counts this
    departure.
    """

    kind: DepartureKind
    worker: str
    detail: str = ""
    by: str = ""
    workers: int = 0
    target_version: int = 0

    def __str__(self) -> str:
        match self.kind:
            case DepartureKind.FAILED:
                return f"{self.worker} failed: {self.detail}"
            case DepartureKind.LEFT:
                return f"{self.worker} leaves: {self.detail or 'it asked to'}"
            case DepartureKind.REMOVED:
                return f"{self.worker} retires: {self.by} asked for it"
            case DepartureKind.SURPLUS:
                return f"{self.worker} retires: {self.by} wants {counted(self.workers, 'worker')}"
            case DepartureKind.UNKNOWN:
                return self.detail
