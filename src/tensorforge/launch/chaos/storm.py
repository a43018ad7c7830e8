"""A storm: what is done to a running job, and when. The same seed gives the same plan."""

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
    """What a strike does."""

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
    """One blow. `pick` (0..1) chooses the victim among those that qualify when it falls."""

    at: float
    kind: StrikeKind
    pick: float
    hold: float = 0.0
    """For a freeze: how many seconds it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormPlan:
    """Strikes in the order of their time, over `duration` seconds."""

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
    """Draw a storm of `rate` strikes per second on average, its times a Poisson process.

    A freeze lasts between half and one and a half `freeze_seconds`.
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
    """Read `kill,freeze`; `all` stands for every kind."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if "all" in names:
        return tuple(StrikeKind)
    known = {kind.value: kind for kind in StrikeKind}
    for name in names:
        if name not in known:
            raise ConfigurationError("kinds", name, f"must be among {', '.join(known)}, or all")
    return tuple(kind for kind in StrikeKind if kind.value in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a strike could hit now."""

    members: tuple[str, ...]
    """Workers that take part and can be told to leave."""
    local: tuple[str, ...]
    """Those of them whose processes can be reached from here."""
    min_workers: int
    max_workers: int | None
    wanted: int
    """How many workers are asked for."""
    coordinator_is_local: bool


@dataclass(frozen=True, slots=True)
class Aim:
    """The victim of a strike, or why there is none."""

    victim: str | None
    refusal: str | None = None


def aim(strike: Strike, target: Target) -> Aim:
    """Choose the victim. A storm never takes the job below its minimum or above its maximum."""
    match strike.kind:
        case StrikeKind.JOIN:
            if target.max_workers is not None and target.wanted >= target.max_workers:
                return Aim(None, f"the maximum is {counted(target.wanted, 'worker')}")
            return Aim(str(target.wanted + 1))
        case StrikeKind.COORDINATOR_KILL:
            if not target.coordinator_is_local:
                return Aim(None, "the coordinator is down, or not on this machine")
            return Aim("coordinator")
        case StrikeKind.LEAVE:
            return _choose(strike, target, target.members)
        case StrikeKind.KILL | StrikeKind.FREEZE:
            return _choose(strike, target, target.local)


def _choose(strike: Strike, target: Target, candidates: tuple[str, ...]) -> Aim:
    if not candidates:
        return Aim(None, "no worker's process can be reached from here")
    if len(target.members) <= target.min_workers:
        return Aim(None, f"the minimum is {counted(len(target.members), 'worker')}")
    return Aim(sorted(candidates)[int(strike.pick * len(candidates))])


def _pause(draw: float, rate: float) -> float:
    return -math.log(1.0 - draw) / rate


def _draws(seed: int) -> Iterator[float]:
    """An endless stream of numbers in 0..1 that depends on the seed alone, on any machine."""
    count = 0
    while True:
        digest = hashlib.blake2b(f"storm:{seed}:{count}".encode(), digest_size=8).digest()
        yield (int.from_bytes(digest, "big") >> 11) / 2**53
        count += 1
