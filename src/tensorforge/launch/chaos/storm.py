"""The plan of a storm: which faults hit a running job, and when. The same seed gives the same plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from tensorforge.errors import ConfigurationError
from tensorforge.validation import finite_number
from tensorforge.wording import counted


class StrikeKind(Enum):
    """The kinds of faults."""

    KILL = "kill"
    """SIGKILL to a worker."""
    FREEZE = "freeze"
    """SIGSTOP to a worker, and SIGCONT some time later."""
    LEAVE = "leave"
    """Ask a worker to leave gracefully."""
    JOIN = "join"
    """Ask for one worker more."""
    COORDINATOR_KILL = "coordinator-kill"
    """SIGKILL to the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One planned fault. `pick` (0 to 1) chooses the victim among those that qualify at that time."""

    at: float
    kind: StrikeKind
    pick: float
    hold: float = 0.0
    """For a freeze: how many seconds it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormPlan:
    """The strikes of a storm of `duration` seconds, in the order of their time."""

    seed: int
    duration: float
    strikes: tuple[Strike, ...]


def plan_storm(
    *,
    seed: int,
    duration: float,
    rate: float,
    kinds: Collection[StrikeKind] = tuple(StrikeKind),
    freeze_seconds: float = 3.0,
) -> StormPlan:
    """Plan a storm of `rate` strikes per second on average; their times are a Poisson process.

    A freeze lasts between 0.5 and 1.5 times `freeze_seconds`.
    """
    finite_number("duration", duration, above=0)
    finite_number("rate", rate, above=0)
    finite_number("freeze_seconds", freeze_seconds, above=0)
    ordered = [kind for kind in StrikeKind if kind in kinds]
    if not ordered:
        raise ConfigurationError("kinds", list(kinds), "must name at least one kind of strike")
    draws = _draws(seed)
    strikes = []
    at = _pause(next(draws), rate)
    while at < duration:
        kind = ordered[int(next(draws) * len(ordered))]
        pick, stretch = next(draws), 0.5 + next(draws)
        hold = freeze_seconds * stretch if kind is StrikeKind.FREEZE else 0.0
        strikes.append(Strike(at=at, kind=kind, pick=pick, hold=hold))
        at += _pause(next(draws), rate)
    return StormPlan(seed=seed, duration=duration, strikes=tuple(strikes))


def parse_kinds(text: str) -> tuple[StrikeKind, ...]:
    """Parse a list like `kill,freeze`; `all` means every kind."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if "all" in names:
        return tuple(StrikeKind)
    known = {kind.value: kind for kind in StrikeKind}
    for name in names:
        if name not in known:
            raise ConfigurationError("kinds", name, f"must be among {', '.join(known)}, or all")
    return tuple(kind for kind in StrikeKind if kind.value in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What a strike can hit now."""

    members: tuple[str, ...]
    """The workers that are members; each can be asked to leave."""
    local: tuple[str, ...]
    """The members whose processes are on this machine."""
    min_workers: int
    max_workers: int | None
    wanted: int
    """The target: how many workers there shall be."""
    coordinator_is_local: bool


@dataclass(frozen=True, slots=True)
class Victim:
    """The victim of a strike, or the reason why there is none. For a JOIN, `name` is the new target."""

    name: str | None
    refusal: str | None = None


def choose_victim(strike: Strike, candidates: Candidates) -> Victim:
    """Choose the victim so that the job stays between its minimum and maximum of workers."""
    match strike.kind:
        case StrikeKind.JOIN:
            if candidates.max_workers is not None and candidates.wanted >= candidates.max_workers:
                return Victim(None, f"the maximum is {counted(candidates.wanted, 'worker')}")
            return Victim(str(candidates.wanted + 1))
        case StrikeKind.COORDINATOR_KILL:
            if not candidates.coordinator_is_local:
                return Victim(None, "the coordinator is down, or not on this machine")
            return Victim("coordinator")
        case StrikeKind.LEAVE:
            return _choose(strike, candidates, candidates.members)
        case StrikeKind.KILL | StrikeKind.FREEZE:
            return _choose(strike, candidates, candidates.local)


def _choose(strike: Strike, candidates: Candidates, eligible: tuple[str, ...]) -> Victim:
    if not eligible:
        return Victim(None, "no worker's process is on this machine")
    if len(candidates.members) <= candidates.min_workers:
        return Victim(None, f"the minimum is {counted(len(candidates.members), 'worker')}")
    return Victim(sorted(eligible)[int(strike.pick * len(eligible))])


def _pause(draw: float, rate: float) -> float:
    return -math.log(1.0 - draw) / rate


def _draws(seed: int) -> Iterator[float]:
    """An endless stream of numbers from 0 to 1 that depends only on the seed, on any machine."""
    count = 0
    while True:
        digest = hashlib.blake2b(f"storm:{seed}:{count}".encode(), digest_size=8).digest()
        yield (int.from_bytes(digest, "big") >> 11) / 2**53
        count += 1
