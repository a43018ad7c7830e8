"""From a rescale to a working group: how one worker follows the generations.

    event ──▶ stop ──▶ ready ──▶ all are ready ──▶ connect ──▶ agree and heal ──▶ formed
                ▲                                                                   │
                └────────────── a newer event, or a broken connection ◀─────────────┘

Everything but the three callbacks of the membership runs in the training thread. A callback notes what
happened, aborts the current group if the group has become useless, and returns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tensorforge.cluster.goal import Goal
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.elastic.protocol.messages import Verdict
from tensorforge.errors import DeadlineExceededError, StaleGenerationError
from tensorforge.train.group.gloo_group import GenerationGroup, GenerationStore, GroupAbortedError
from tensorforge.train.group.membership import Membership, RunEnd, Start

log = logging.getLogger(__name__)

_SIGNAL_POLL_SECONDS = 0.25
_RELEASE_SECONDS = 5.0
_GENERATION_SECONDS = 600.0
"""How long a member waits for the next generation to form."""


class FormOutcome(Enum):
    """This worker is in a working group, or the cluster goes on without it, or the run is over for all."""

    MEMBER = "member"
    RELEASED = "released"
    ENDED = "ended"


class Requests(NamedTuple):
    """Whether a later generation waits (`drain`), this worker shall leave, and the run shall stop, after
    the step.

    Before the vote each field is 0 or 1; after the vote it counts the members that request it.
    """

    drain: int
    leave: int
    stop: int


@dataclass(slots=True)
class FormationTimes:
    """One formation as this worker saw it: milliseconds per phase, in order, and what was moved."""

    generation: int
    reason: str
    world_size: int
    phases: dict[str, float] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)


class Session:
    """This worker's current generation and its group, and what was requested of the worker meanwhile.

    Signal handlers set `leave_reason` and `stop_reason`; `requests` brings both into the vote of the next step.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._condition = threading.Condition()
        self._newest: RescalingEvent | None = None
        self._newest_at = time.monotonic()
        self.ended: RunEnd | None = None
        """Why the run is over, or `None` while it is not."""
        self._fenced_generation = 0
        self.leave_reason: str | None = None
        self.stop_reason: str | None = None
        self._asked_to_leave = self._asked_together = False
        self._answer_due = math.inf
        self.is_stopping = False
        """Whether a vote has decided that the run stops."""
        self.generation = 0
        self.rank = 0
        self.world_size = 1
        self.topology: ClusterTopology | None = None
        self.group: GenerationGroup | None = None
        self._retired: GenerationGroup | None = None
        self._store: GenerationStore | None = None
        self._is_formed = False
        self.formations: list[FormationTimes] = []
        """Every formation in which this worker became a member, oldest first."""

    @property
    def is_formed(self) -> bool:
        """Whether this worker is in a group that works, as far as is known."""
        return self._is_formed and not self.interrupted

    @property
    def interrupted(self) -> bool:
        """Whether the current group cannot commit any more, so that more work with it is pointless."""
        if self.ended is not None or self._fenced_generation >= self.generation > 0:
            return True
        newest = self._newest
        if newest is not None and newest.urgent and newest.new_topology.epoch > self.generation:
            return True
        return self.group is not None and self.group.is_aborted

    @property
    def drain_requested(self) -> bool:
        """Whether a later generation waits for the end of the current step."""
        newest = self._newest
        return newest is not None and newest.new_topology.epoch > self.generation

    @property
    def last_formed_generation(self) -> int:
        """The last generation in which this worker was in a working group; 0 before the first."""
        return self.formations[-1].generation if self.formations else 0

    def connect(self, terms: Mapping[str, str], goal: Goal) -> None:
        """Join the cluster; a coordinator refuses a worker with other terms or another goal than the run's."""
        self._membership.connect(
            self._on_event, self._on_ended, self._on_fenced, terms=terms, goal=goal
        )

    def _on_event(self, event: RescalingEvent) -> None:
        with self._condition:
            known = self._newest.new_topology.epoch if self._newest else -1
            if event.new_topology.epoch <= known:
                return
            self._newest = event
            self._newest_at = time.monotonic()
            group = self.group if event.urgent else None
            self._condition.notify_all()
        if group is not None and group.generation < event.new_topology.epoch:
            group.abort(f"generation {event.new_topology.epoch} follows: {event.trigger_reason}")

    def _on_ended(self, end: RunEnd) -> None:
        with self._condition:
            self.ended = end
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

    def requests(self) -> Requests:
        """What this worker brings into the vote of the current step."""
        if self.stop_reason is None and self._must_stop():
            self.stop_reason = self.leave_reason
        return Requests(
            drain=int(self.drain_requested),
            leave=int(self.leave_reason is not None),
            stop=int(self.stop_reason is not None),
        )

    def follow(self, requests: Requests) -> None:
        """Act on the counts of a vote. Every member acts on the same counts after the same step."""
        if requests.stop:
            self.is_stopping = True
        elif self.leave_reason is not None:
            self._ask_to_leave(together=requests.leave == self.world_size)
        if requests.drain:
            self._retire_group()

    def _ask_to_leave(self, *, together: bool) -> None:
        """Ask the coordinator once, and once more when all members leave: another worker may take over.

        Without a coordinator that can replace this worker, the run stops: now if all members leave, else after
        the next vote.
        """
        if self._asked_to_leave and (self._asked_together or not together):
            return
        self._asked_to_leave, self._asked_together = True, together
        reason = self.leave_reason or ""
        if not self._membership.leave(reason, together=together):
            self.stop_reason = self.leave_reason
            self.is_stopping = together
        elif together:
            self._answer_due = time.monotonic() + _RELEASE_SECONDS

    def _must_stop(self) -> bool:
        """Whether this worker wants to leave and cannot: nobody can take over, or no coordinator answers."""
        if self._membership.leave_refused is not None:
            return True
        return time.monotonic() >= self._answer_due and not self.drain_requested

    def _retire_group(self) -> None:
        """Stop using the group but leave it open, because other members may still be in its last vote."""
        self._is_formed = False
        with self._condition:
            self._retired, self.group = self.group, None

    def abandon_group(self, error: BaseException) -> None:
        """Drop the group because an operation failed in it; report that, unless the reason is known already."""
        log.info("generation %d broke: %s", self.generation, error)
        if not self.drain_requested and self.ended is None:
            self._membership.suspect(self.generation, str(error))
        self._drop_group()

    def _drop_group(self) -> None:
        self._is_formed = False
        with self._condition:
            groups = [group for group in (self.group, self._retired) if group is not None]
            self.group = self._retired = None
        for group in groups:
            group.close()
        if self._store is not None:
            self._store.close()
            self._store = None

    def form(
        self,
        position: Callable[[], tuple[int, int | None]],
        agree: Callable[[GenerationGroup | None, Verdict], dict[str, int]],
    ) -> FormOutcome:
        """Follow the newest generation until there is a group in which `agree` has succeeded.

        `position` returns the last committed step and the prepared step, if there is one. `agree` brings all
        members to one state and returns what was moved for that.
        """
        if self.group is not None:
            self._drop_group()
        while True:
            event = self._await_event()
            if event is None and self.ended is not None:
                return FormOutcome.ENDED
            if event is None:
                if self._leaves_unformed():
                    return FormOutcome.RELEASED
                continue
            if self._membership.worker_id not in event.new_topology:
                self._membership.wait_for_release(_GENERATION_SECONDS)
                return FormOutcome.RELEASED
            times = FormationTimes(
                event.new_topology.epoch, event.trigger_reason, event.new_topology.world_size
            )
            clock = _PhaseClock(times, self._newest_at)
            try:
                start = self._await_members(event, *position(), clock)
                if start is None:
                    if self.ended is None and self._membership.wait_for_release(0):
                        return FormOutcome.RELEASED
                    continue
                self._connect_group(start.store)
                clock.mark("connect")
                times.moved = agree(self.group, start.verdict)
                clock.mark("agree")
            except (GroupAbortedError, StaleGenerationError) as error:
                self.abandon_group(error)
                continue
            self._membership.formed(self.generation, times.moved)
            self._is_formed = True
            self.formations.append(times)
            return FormOutcome.MEMBER

    def _leaves_unformed(self) -> bool:
        """Ask to leave while there is no group; return whether this worker may go.

        A worker that has the run's state goes only when the coordinator lets it: others may need the state.
        """
        self._ask_to_leave(together=False)
        if self.last_formed_generation == 0:
            self._membership.wait_for_release(_RELEASE_SECONDS)
            return True
        return self._membership.wait_for_release(0)

    def _await_event(self) -> RescalingEvent | None:
        """The newest event that was not followed yet; `None` if the run has ended or this worker leaves."""
        # A worker that was never a member waits for as long as the coordinator lets it.
        timeout = _GENERATION_SECONDS if self.generation else math.inf
        deadline = time.monotonic() + timeout
        with self._condition:
            while True:
                if self.ended is not None:
                    return None
                if self._newest is not None and self._newest.new_topology.epoch > self.generation:
                    return self._newest
                if self.leave_reason is not None:
                    self._condition.wait(_SIGNAL_POLL_SECONDS if self._asked_to_leave else 0)
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(
                        f"no generation followed generation {self.generation} within "
                        f"{_GENERATION_SECONDS:g} s: the coordinator is away, or there are too few workers"
                    )
                # Short waits, because a signal handler cannot notify.
                self._condition.wait(min(left, _SIGNAL_POLL_SECONDS))

    def _await_members(
        self,
        event: RescalingEvent,
        committed_step: int,
        prepared_step: int | None,
        clock: _PhaseClock,
    ) -> Start | None:
        """Enter the event's generation and wait until all its members are ready.

        Return where they meet and what they do first; `None` if another generation follows instead.
        """
        topology = event.new_topology
        self.generation = topology.epoch
        self.rank = topology.rank_of(self._membership.worker_id)
        self.world_size = topology.world_size
        self.topology = topology
        offered = None
        if self.rank == 0 and self.world_size > 1:
            self._store = GenerationStore(self._membership.worker_id.hostname)
            offered = self._store.address
        clock.mark("stop")
        self._membership.ready(self.generation, committed_step, prepared_step, offered)
        start = self._membership.wait_for_start(self.generation, _GENERATION_SECONDS)
        clock.mark("gather")
        if (
            self._retired is not None
        ):  # all members are ready, so no member is in its last vote any more
            self._retired.close()
            self._retired = None
        if start is None:
            self._drop_group()
        return start

    def _connect_group(self, store: str) -> None:
        if self.world_size == 1:
            return
        group = GenerationGroup(
            store=store,
            generation=self.generation,
            rank=self.rank,
            world_size=self.world_size,
            host=self._membership.worker_id.hostname,
        )
        with self._condition:
            self.group = group
        if self.interrupted:  # by an event that came before `self.group` was set
            group.abort("a later generation follows")
        group.form()

    def close(self) -> None:
        """Leave the cluster, then drop the group: other members may still read the last message from it."""
        self._membership.close()
        self._drop_group()


class _PhaseClock:
    def __init__(self, times: FormationTimes, started: float) -> None:
        self._times = times
        self._last = started

    def mark(self, phase: str) -> None:
        """Note the milliseconds since the previous mark as the duration of `phase`."""
        now = time.monotonic()
        self._times.phases[phase] = round((now - self._last) * 1000, 3)
        self._last = now
