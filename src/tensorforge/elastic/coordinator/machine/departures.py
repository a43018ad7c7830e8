"""How workers leave: lost, asked to leave, released; and how the run ends for all of them."""

from __future__ import annotations

from tensorforge.cluster.workers import WorkerStatus
from tensorforge.elastic.coordinator.journal_records import RunEnded
from tensorforge.elastic.coordinator.machine.cluster_state import Cause, ClusterState, Phase
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.protocol.reasons import Departure, DepartureKind, RunOutcome


class Departures:
    """Takes workers out. `Generations` reads `state.causes` afterwards and decides what the others do."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def lose(
        self, who: Participant, why: str, evidence_at: float, now: float, *, is_open: bool = True
    ) -> None:
        """Take a worker for dead. With `is_open`, its stream still exists, and the worker is told."""
        state = self._state
        connection = state.roster.drop(who)
        if connection is not None and is_open:
            text = f"{who.id} was taken out of the cluster: {why}"
            state.out.refuse(connection, messages.REFUSED_FENCED, text)
        if who.finished or state.phase in (Phase.FINISHING, Phase.ENDED):
            return
        state.last_change = now
        departure = state.departure(DepartureKind.FAILED, who, detail=why)
        state.out.note("warning", str(departure))
        if state.roster.is_member(who.id):
            state.tolerance.losses += 1
            state.removed[who.id] = departure
            state.causes.append(Cause(str(departure), evidence_at, is_failure=True))
        elif who.is_leaving:
            # The others may be waiting for it in the last collective of the old generation.
            text = f"{departure} (while it was leaving)"
            state.causes.append(Cause(text, evidence_at, is_failure=True))

    def dismiss(self, who: Participant, departure: Departure, now: float) -> None:
        """Let a worker leave: a member after its step, anybody else at once."""
        state = self._state
        if who.is_leaving or who.finished:
            return
        who.leave_reason = departure
        who.transition(WorkerStatus.LEAVING)
        if not state.roster.is_member(who.id):
            self.release(who)
        elif state.phase is not Phase.FINISHING:
            state.removed[who.id] = departure
            state.causes.append(Cause(str(departure), now, is_failure=False))

    def release(self, who: Participant) -> None:
        """Tell a worker that nobody needs it any more, and end its stream."""
        out = self._state.out
        connection = self._state.roster.drop(who)
        reason = str(who.leave_reason or "it is not needed any more")
        out.note("info", f"{who.id} is released: {reason}")
        if connection is not None:
            out.send((connection,), messages.Released(reason=reason))
            out.close(connection)

    def end(self, outcome: RunOutcome, reason: str, *, emergency: bool = False) -> None:
        """End the run for everybody. `emergency` asks the members to save a checkpoint."""
        state = self._state
        state.ended = RunEnded(outcome=outcome, reason=reason, emergency=emergency)
        state.phase = Phase.ENDED
        state.deadline = state.silence_at = state.suspicion = None
        state.causes.clear()
        state.out.record(state.ended)
        level = "info" if outcome is RunOutcome.COMPLETED else "error"
        state.out.note(level, f"the run {outcome}: {reason}")
        everybody = [p for p in state.roster if p.connection is not None]
        for participant in everybody:
            state.roster.drop(participant)
        self.tell_end(*(p.connection for p in everybody if p.connection is not None))

    def tell_end(self, *connections: int) -> None:
        """Tell these streams how the run ended, and close them."""
        state = self._state
        if state.ended is None:
            return
        state.out.send(connections, state.ended.message)
        for connection in connections:
            state.out.close(connection)
