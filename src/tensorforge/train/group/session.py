"""From a rescale to a working group: how one process follows the generations.

    event ──▶ stop ──▶ ready ──▶ all gathered ──▶ connect ──▶ agree and heal ──▶ formed
                ▲                                                                  │
                └────────────── a newer event, or a broken connection ◀────────────┘

Everything but the two callbacks runs in the training thread. The callbacks abort the group of the moment
and return.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.errors import DeadlineExceededError, StaleGenerationError
from tensorforge.train.group.gloo_group import GenerationGroup, GenerationStore, GroupAbortedError
from tensorforge.train.group.membership import Gathering, Membership, RunEnd

log = logging.getLogger(__name__)

_SIGNAL_POLL_SECONDS = 0.25
_RELEASE_SECONDS = 5.0


class Standing(Enum):
    """What has become of this worker."""

    MEMBER = "member"
    RELEASED = "released"
    ENDED = "ended"


@dataclass(slots=True)
class FormationTimes:
    """One formation as this worker saw it; milliseconds per phase, in order."""

    generation: int
    reason: str
    world_size: int
    phases: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """Where this worker stands when it stops."""

    committed_step: int
    prepared_step: int | None


class Session:
    """The current generation and its group."""

    def __init__(
        self, membership: Membership, *, patience: float = 600.0, connect_timeout: float = 10.0
    ) -> None:
        self._membership = membership
        self._patience = patience
        self._connect_timeout = connect_timeout
        self._condition = threading.Condition()
        self._newest: RescalingEvent | None = None
        self._noticed = time.monotonic()
        self._ended: RunEnd | None = None
        self._fenced_generation = 0
        self.leave_reason: str | None = None
        """Set by a signal handler: this worker wants to go, also if it is waiting for a generation."""
        self.generation = 0
        self.rank = 0
        self.world_size = 1
        self.topology: ClusterTopology | None = None
        self.group: GenerationGroup | None = None
        self._retired: GenerationGroup | None = None
        self._store: GenerationStore | None = None
        self._is_formed = False
        self.spared_ports: frozenset[int] = frozenset()
        self.times: list[FormationTimes] = []

    @property
    def is_formed(self) -> bool:
        """Whether there is a group that works, as far as is known."""
        return self._is_formed and not self.interrupted

    @property
    def interrupted(self) -> bool:
        """Whether the current group is beyond use: do not start more work with it."""
        if self._ended is not None or self._fenced_generation >= self.generation > 0:
            return True
        newest = self._newest
        if newest is not None and newest.urgent and newest.new_topology.epoch > self.generation:
            return True
        return self.group is not None and self.group.is_aborted

    @property
    def drain_wanted(self) -> bool:
        """Whether a later generation waits for the end of the current step."""
        newest = self._newest
        return newest is not None and newest.new_topology.epoch > self.generation

    @property
    def ended(self) -> RunEnd | None:
        """Why the run is over, if it is."""
        return self._ended

    def connect(self) -> None:
        """Join the cluster."""
        self._membership.connect(self._on_event, self._on_ended, self._on_fenced)

    def _on_event(self, event: RescalingEvent) -> None:
        with self._condition:
            known = self._newest.new_topology.epoch if self._newest else -1
            if event.new_topology.epoch <= known:
                return
            self._newest = event
            self._noticed = time.monotonic()
            group = self.group if event.urgent else None
            self._condition.notify_all()
        if group is not None and group.generation < event.new_topology.epoch:
            group.abort(f"generation {event.new_topology.epoch} follows: {event.trigger_reason}")

    def _on_ended(self, end: RunEnd) -> None:
        with self._condition:
            self._ended = end
            group = self.group
            self._condition.notify_all()
        if group is not None:
            group.abort(f"the run has ended: {end.reason}")

    def _on_fenced(self, reason: str) -> None:
        with self._condition:
            self._fenced_generation = self.generation
            group = self.group
        if group is not None:
            group.abort(f"the cluster went on without this worker: {reason}")

    def break_up(self, error: BaseException) -> None:
        """The group failed under our hands."""
        log.info("generation %d broke: %s", self.generation, error)
        if not self.drain_wanted and self._ended is None:
            self._membership.suspect(self.generation, str(error))
        self._drop_group()

    def retire(self) -> None:
        """Use the group no more, but leave it open: others may still be in its last vote."""
        self._is_formed = False
        with self._condition:
            self._retired, self.group = self.group, None

    def _drop_group(self) -> None:
        self._is_formed = False
        with self._condition:
            gone = [group for group in (self.group, self._retired) if group is not None]
            self.group = self._retired = None
        for group in gone:
            group.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def form(
        self,
        position: Callable[[], Position],
        agree: Callable[[GenerationGroup | None], dict[str, int]],
    ) -> Standing:
        """Follow the newest generation until there is a group in which `agree` has succeeded.

        `agree` brings all members to one state and returns what that moved.
        """
        if self.group is not None:
            self._drop_group()
        while True:
            event = self._await_event()
            if event is None and self._ended is None:
                self._membership.leave(self.leave_reason or "")
                self._membership.wait_for_release(_RELEASE_SECONDS)
                return Standing.RELEASED
            if event is None:
                return Standing.ENDED
            if self._membership.worker_id not in event.new_topology:
                self._membership.wait_for_release(self._patience)
                return Standing.RELEASED
            times = FormationTimes(
                event.new_topology.epoch, event.trigger_reason, event.new_topology.world_size
            )
            clock = _Clock(times, self._noticed)
            try:
                gathering = self._gather(event, position(), clock)
                if gathering is None:
                    if self._ended is None and self._membership.wait_for_release(0):
                        return Standing.RELEASED
                    continue
                self._connect_group(gathering)
                clock.mark("connect")
                times.moved = agree(self.group)
                clock.mark("agree")
            except (GroupAbortedError, StaleGenerationError) as error:
                self.break_up(error)
                continue
            self._membership.formed(self.generation, times.moved)
            self._is_formed = True
            self.times.append(times)
            return Standing.MEMBER

    def _await_event(self) -> RescalingEvent | None:
        """The newest event that was not followed yet; `None` when the run has ended or this worker is to go."""
        # A joiner or a standby waits for as long as the coordinator lets it.
        patience = self._patience if self.generation else math.inf
        deadline = time.monotonic() + patience
        with self._condition:
            while True:
                if self._ended is not None:
                    return None
                if self._newest is not None and self._newest.new_topology.epoch > self.generation:
                    return self._newest
                if self.leave_reason is not None:
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(
                        f"no new generation after {self.generation} within {self._patience:g} s: "
                        "the coordinator is away, or there are too few workers"
                    )
                # Short waits, because a signal handler cannot notify.
                self._condition.wait(min(left, _SIGNAL_POLL_SECONDS))

    def _gather(self, event: RescalingEvent, position: Position, clock: _Clock) -> Gathering | None:
        topology = event.new_topology
        self.generation = topology.epoch
        self.rank = topology.rank_of(self._membership.worker_id)
        self.world_size = topology.world_size
        self.topology = topology
        store = None
        if self.rank == 0 and self.world_size > 1:
            self._store = GenerationStore(self._membership.worker_id.hostname)
            store = self._store.address
        clock.mark("stop")
        self._membership.ready(
            topology.epoch, position.committed_step, position.prepared_step, store
        )
        gathering = self._membership.wait_for_gathering(topology.epoch, self._patience)
        clock.mark("gather")
        if self._retired is not None:  # everybody stands at the barrier, so everybody is through
            self._retired.close()
            self._retired = None
        if gathering is None or gathering.generation != topology.epoch:
            self._drop_group()
            return None
        return gathering

    def _connect_group(self, gathering: Gathering) -> None:
        if self.world_size == 1:
            return
        group = GenerationGroup(
            store=gathering.store,
            generation=gathering.generation,
            rank=self.rank,
            world_size=self.world_size,
            host=self._membership.worker_id.hostname,
            connect_timeout=self._connect_timeout,
            spared_ports=self.spared_ports,
        )
        with self._condition:
            self.group = group
        if self.interrupted:  # an event that came before the group could be aborted by it
            group.abort("a later generation follows")
        group.form()

    def close(self) -> None:
        """Leave the cluster, then give up the group: others may still read our last words from it."""
        self._membership.close()
        self._drop_group()


class _Clock:
    def __init__(self, times: FormationTimes, started: float) -> None:
        self._times = times
        self._last = started

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self._times.phases[phase] = round((now - self._last) * 1000, 3)
        self._last = now
