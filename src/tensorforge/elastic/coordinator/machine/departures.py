"""How workers go: lost, asked to leave, released; and how the run ends for all of them."""

from __future__ import annotations

from tensorforge.cluster.workers import WorkerStatus
from tensorforge.elastic.coordinator import journal_records
from tensorforge.elastic.coordinator.machine.cluster_state import Cause, ClusterState, Phase
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol import messages


class Departures:
    """Takes workers out. What the others do about it is decided afterwards, from the causes left here."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def lose(
        self, who: Participant, why: str, evidence_at: float, now: float, *, is_open: bool = True
    ) -> None:
        """Take a worker for dead. If its stream is still open, it is told so."""
        state = self._state
        connection = state.roster.drop(who)
        if connection is not None and is_open:
            text = f"{who.id} was taken out of the cluster: {why}"
            state.out.refuse(connection, messages.REFUSED_FENCED, text)
        if who.finished or state.phase in (Phase.FINISHING, Phase.ENDED):
            return
        state.last_change = now
        text = f"{who.id} failed: {why}"
        state.out.note("warning", text)
        if state.roster.is_member(who.id):
            state.tolerance.losses += 1
            state.gone[who.id] = text
            state.causes.append(Cause(text, evidence_at, is_failure=True))
        elif who.is_leaving:
            # The others may be waiting for it in the last collective of the old generation.
            text = f"{who.id} failed while it was leaving: {why}"
            state.causes.append(Cause(text, evidence_at, is_failure=True))

    def dismiss(self, who: Participant, why: str, now: float) -> None:
        """Let a worker go: a member after its step, anybody else at once."""
        state = self._state
        if who.is_leaving or who.finished:
            return
        who.leave_reason = why
        who.move(WorkerStatus.LEAVING)
        if not state.roster.is_member(who.id):
            self.release(who)
        elif state.phase is not Phase.FINISHING:
            state.gone[who.id] = why
            state.causes.append(Cause(why, now, is_failure=False))

    def release(self, who: Participant) -> None:
        """Nobody needs this worker any more."""
        out = self._state.out
        connection = self._state.roster.drop(who)
        reason = who.leave_reason or "it is not needed any more"
        out.note("info", f"{who.id} is released: {reason}")
        if connection is not None:
            out.send((connection,), messages.Released(reason=reason))
            out.close(connection)

    def end(self, outcome: str, reason: str, *, emergency: bool = False) -> None:
        """End the run for everybody."""
        state = self._state
        state.ended = journal_records.RunEnded(outcome=outcome, reason=reason, emergency=emergency)
        state.phase = Phase.ENDED
        state.deadline = state.silence_at = state.suspicion = None
        state.causes.clear()
        state.out.record(state.ended)
        level = "info" if outcome == "completed" else "error"
        state.out.note(level, f"the run {outcome}: {reason}")
        everybody = [p for p in state.roster if p.connection is not None]
        for participant in everybody:
            state.roster.drop(participant)
        self.tell_end(*(p.connection for p in everybody if p.connection is not None))

    def tell_end(self, *connections: int) -> None:
        """Tell these streams that the run is over, and how."""
        state = self._state
        if state.ended is None:
            return
        message = messages.Ended(
            outcome=state.ended.outcome,
            reason=state.ended.reason,
            emergency=state.ended.emergency,
        )
        state.out.send(connections, message)
        for connection in connections:
            state.out.close(connection)
