"""How one generation follows another: when, with which members, and what they are told."""

from __future__ import annotations

from datetime import datetime

import msgspec

from tensorforge.cluster.elastic_config import RescaleType
from tensorforge.cluster.workers import WorkerId, WorkerStatus
from tensorforge.elastic.coordinator import journal_records
from tensorforge.elastic.coordinator.machine.cluster_state import Cause, ClusterState, Phase
from tensorforge.elastic.coordinator.machine.departures import Departures
from tensorforge.elastic.coordinator.machine.rescale_policy import join_deadline
from tensorforge.elastic.coordinator.machine.roster import Participant, arrange
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.reasons import RunOutcome
from tensorforge.wording import counted

_NAMED = 20
"""How many joiners a reason names; the rest are counted."""


class Generations:
    """Decides generations and takes each one through its barrier and its formation."""

    def __init__(self, state: ClusterState, departures: Departures) -> None:
        self._state = state
        self._departures = departures

    def decide(self, now: float) -> None:
        """Decide what the state now calls for: react to losses, close a barrier, take joiners in, finish."""
        state = self._state
        if state.phase is Phase.ENDED:
            return
        if state.phase is Phase.FINISHING:
            if all(p.finished for p in state.roster if state.holds_state(p)):
                self._departures.end_finished()
                return
            if state.suspicion is None or now < state.suspicion.due:
                return
            self._departures.finished_alone(now)
        if state.suspicion is not None and now >= state.suspicion.due:
            state.causes.append(Cause(state.suspicion.text, now, is_failure=True))
        if state.causes:
            self._react(now)
        if state.phase in (Phase.RESCALING, Phase.PAUSED):
            self._close_barrier(now)
        if state.phase is Phase.FORMING and len(state.barrier.formed) >= len(state.roster.members):
            self._activate(now)
            if state.causes:
                self._react(now)
        joins = self.join_deadline()
        if joins is not None and now >= joins:
            self._take_in(now)

    # When

    def _react(self, now: float) -> None:
        state = self._state
        causes, state.causes = state.causes, []
        is_failure = any(cause.is_failure for cause in causes)
        reason = "; ".join(cause.text for cause in causes)
        state.suspicion = None
        if is_failure:
            is_new = state.phase in (Phase.ACTIVE, Phase.FORMING) or state.barrier.has_failed
            verdict = state.tolerance.verdict(is_new_failure=is_new)
            if verdict is not None:
                why = f"{verdict}: {reason}"
                self._departures.end(RunOutcome.ABORTED, why, emergency=True)
                return
        evidence_at = min(cause.evidence_at for cause in causes)
        self._begin(now, reason, urgent=is_failure, evidence_at=evidence_at)

    def join_deadline(self) -> float | None:
        """When the waiting workers are taken in; `None` while they cannot be."""
        state = self._state
        if state.phase is Phase.PAUSED:
            return state.last_change if self._can_end_pause() else None
        waiting = len(state.roster.waiting)
        if not waiting or state.phase not in (Phase.GATHERING, Phase.ACTIVE):
            return None
        if state.limit is not None and len(state.roster.members) >= state.limit:
            return None
        if state.phase is Phase.GATHERING:
            if waiting < state.config.min_workers:
                return None
            if state.limit is not None and waiting >= state.limit:
                return state.last_change
        return join_deadline(
            first_join=state.last_change if state.first_join is None else state.first_join,
            last_change=state.last_change,
            stability=state.timeouts.stability,
            patience=state.timeouts.pause,
        )

    def _can_end_pause(self) -> bool:
        state = self._state
        enough = len(state.continuing()) + len(state.next_in_line()) >= state.config.min_workers
        return enough and self.unseen_group() is None

    def unseen_group(self) -> int | None:
        """The earlier generation that may be training out of sight, so that no other group may start."""
        state = self._state
        everybody = (*state.continuing(), *state.next_in_line())
        return state.open_groups.blocked_by(p.seat for p in everybody)

    def _take_in(self, now: float) -> None:
        names = list(self._state.roster.waiting)
        if self._state.phase is Phase.GATHERING:
            reason = "the first worker is here"
            if len(names) > 1:
                reason = f"the first {len(names)} workers are here"
        elif not names:
            reason = "the group that was out of sight is known to have stopped"
        else:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            reason = f"{', '.join(names[:_NAMED])}{more} joined"
        self._begin(now, reason, urgent=False, evidence_at=now)

    # With which members

    def _begin(self, now: float, reason: str, *, urgent: bool, evidence_at: float) -> None:
        """Decide the next generation and announce it to its members and to those who leave."""
        state, roster = self._state, self._state.roster
        old, old_generation = roster.members, state.generation
        staying, newcomers = state.continuing(), state.next_in_line()
        blocked_by = self.unseen_group()
        if blocked_by is not None:
            newcomers = []
            reason += f"; generation {blocked_by} may still be training"
        added = tuple(p.worker for p in newcomers)
        members = arrange(old, {p.id for p in staying}, added)
        roster.seat_members(members)
        present = roster.present_members()
        for participant in present:
            if not participant.is_leaving:
                participant.transition(WorkerStatus.RESCALING)
        state.generation += 1
        state.urgent = state.urgent or urgent
        state.first_join = now if roster.waiting else None
        entry = journal_records.Decided(
            generation=state.generation,
            old_generation=old_generation,
            seats=tuple(p.seat for p in present),
            type=RescaleType.of(len(old), len(members)).value,
            reason=reason,
            urgent=state.urgent,
            paused=len(members) < state.config.min_workers or blocked_by is not None,
            added=tuple(worker.id for worker in added),
            removed=dict(state.removed),
            old_size=len(old),
            detection_ms=max(0.0, (now - evidence_at) * 1000),
            decided_at=state.utc(now).isoformat(timespec="milliseconds"),
        )
        state.removed = {}
        if old_generation == 0 and state.terms is not None:
            state.out.record(state.terms)
        state.out.record(entry)
        state.rescale_log.decided(entry, now)
        size = counted(len(members), "worker")
        state.out.note("info", f"generation {state.generation}: {size}: {reason}")
        state.open_barrier(now, paused=entry.paused)
        self.announce([*present, *roster.leavers()], old_generation, old)

    # What they are told

    def announce(
        self,
        recipients: list[Participant],
        old_generation: int,
        old: tuple[WorkerId, ...] | None = None,
    ) -> None:
        """Send the newest generation; who knows its predecessor `old` is sent only the change."""
        state = self._state
        change = None if old is None else messages.change_between(old, state.roster.members)
        knowing: list[int] = []
        others: list[int] = []
        for participant in recipients:
            if participant.connection is None:
                continue
            knows = change is not None and participant.known_generation == old_generation
            (knowing if knows else others).append(participant.connection)
            participant.known_generation = state.generation
        decision = state.rescale_log.history[-1]
        full = messages.Rescale(
            generation=state.generation,
            old_generation=old_generation,
            workers=state.roster.members,
            urgent=state.urgent,
            reason=decision.reason,
            decided_at=datetime.fromisoformat(decision.decided_at),
        )
        difference = msgspec.structs.replace(full, workers=None, change=change)
        state.out.send(tuple(knowing), difference)
        state.out.send(tuple(others), full)

    def _close_barrier(self, now: float) -> None:
        state = self._state
        if len(state.barrier.answers) < len(state.roster.members):
            return
        if state.phase is Phase.PAUSED and self.unseen_group() is not None:
            return  # The leavers may be the ones that train on; only they can say that they have stopped.
        for participant in state.roster.leavers():
            self._departures.release(participant)
        if state.phase is Phase.PAUSED:
            return
        state.rescale_log.stopped(now)
        state.phase = Phase.FORMING
        state.deadline = now + state.timeouts.barrier
        members = state.roster.present_members()
        state.open_groups.begin(state.generation, (p.seat for p in members))
        self.send_formation(tuple(p.connection for p in members if p.connection is not None))

    def send_formation(self, connections: tuple[int, ...]) -> None:
        """Send what all members said at the barrier, which has closed."""
        state = self._state
        members = state.roster.present_members()
        notice = state.barrier.notice(state.generation, members, state.formed_seats)
        state.out.send(connections, notice)

    # How far it has come

    def _activate(self, now: float) -> None:
        state = self._state
        members = state.roster.present_members()
        state.phase, state.deadline, state.urgent = Phase.ACTIVE, None, False
        state.formed_generation = state.generation
        state.formed_seats = frozenset((p.id, p.incarnation) for p in members)
        state.finishes = {}
        state.tolerance.expect(len(members))
        for participant in members:
            if not participant.is_leaving:
                participant.transition(WorkerStatus.ACTIVE)
                continue
            # It has handed its state over.
            if participant.leave_reason is not None:
                state.removed[participant.id] = participant.leave_reason
                text = str(participant.leave_reason)
                state.causes.append(Cause(text, now, is_failure=False))
        state.out.record(state.rescale_log.formed(state.generation, state.barrier.moved, now))
        state.out.note("info", f"generation {state.generation} is active")
        if state.barrier.early_commit is not None:
            self._first_commit(state.barrier.early_commit, now)

    def committed(self, progress: messages.Progress, now: float) -> None:
        """A step of the newest generation was committed; the first one is recorded."""
        state = self._state
        if state.has_committed:
            return
        if state.phase is Phase.ACTIVE:
            self._first_commit(progress, now)
        elif state.phase in (Phase.RESCALING, Phase.FORMING):
            state.barrier.early_commit = progress

    def _first_commit(self, progress: messages.Progress, now: float) -> None:
        state = self._state
        state.has_committed = True
        state.tolerance.forgive(len(state.roster.members))
        state.out.record(state.rescale_log.committed(progress, now))
