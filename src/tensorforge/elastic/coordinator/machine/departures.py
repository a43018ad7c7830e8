"""How workers leave: lost, asked to leave, released; and how the run ends for all of them."""

from __future__ import annotations

from tensorforge.cluster.workers import WorkerStatus
from tensorforge.elastic.coordinator.journal_records import RunEnded, WasFinished
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

    def finish(self, who: Participant, message: messages.Finish) -> bool:
        """Note that training is over on a member of the formed generation; return whether that counts.

        It does not count before the first committed step, unless the goal is reached without one, and not from
        anybody else: a newcomer cannot end the run.
        """
        state = self._state
        goal = None if state.terms is None else state.terms.goal
        has_goal = goal is not None and goal.is_reached(message.committed_step, message.epoch)
        counts = message.generation == state.formed_generation and state.holds_state(who)
        if state.finishes.get((who.id, who.incarnation)) == message:
            return True
        if not counts or (message.committed_step < 0 and not has_goal):
            state.out.note("warning", f"{who.id} cannot finish the run: it did not train in it")
            return False
        who.finished = True
        who.transition(WorkerStatus.LEAVING)
        state.finishes[who.id, who.incarnation] = message
        entry = WasFinished(
            seat=who.seat,
            generation=message.generation,
            committed_step=message.committed_step,
            epoch=message.epoch,
            reason=message.reason,
        )
        state.out.record(entry)
        position = f"after step {message.committed_step}"
        state.out.note("info", f"{who.id} finished {position}: {message.reason or 'complete'}")
        return True

    def end_finished(self) -> None:
        """End the run after all members that are left have finished: complete only if the goal was reached.

        A member that was lost before it said so may have been the one that saved the last checkpoint.
        """
        state = self._state
        newest = max(state.finishes.values(), key=lambda finish: finish.committed_step)
        step, epoch = newest.committed_step, newest.epoch
        goal = None if state.terms is None else state.terms.goal
        missing = sorted(name for name, _ in state.formed_seats - state.finishes.keys())
        if goal is not None and not goal.is_reached(step, epoch):
            why = f"stopped at {goal.describe_position(step, epoch)}"
            if newest.reason:
                why += f": {newest.reason}"
            self.end(RunOutcome.STOPPED, why)
        elif missing:
            why = (
                f"stopped at the goal: {', '.join(missing)} did not confirm the end of the training"
            )
            self.end(RunOutcome.STOPPED, why)
        else:
            reached = "" if goal is None else f" ({goal})"
            self.end(RunOutcome.COMPLETED, f"training is complete{reached}")

    def finished_alone(self, now: float) -> None:
        """Take out the members that have finished while others go on; those form a generation without them."""
        state = self._state
        state.phase, state.deadline, state.suspicion = Phase.ACTIVE, None, None
        for who in [p for p in state.roster if p.finished]:
            state.removed[who.id] = state.departure(DepartureKind.LEFT, who, detail="it finished")
            self.release(who)
        text = "members finished although the others go on"
        state.causes.append(Cause(text, now, is_failure=True))

    def end(self, outcome: RunOutcome, reason: str, *, emergency: bool = False) -> None:
        """End the run for everybody. `emergency` asks a member that has the state to save a checkpoint."""
        state = self._state
        there = (p.id for p in state.roster if p.connection is not None and state.holds_state(p))
        saver = next(there, None) if emergency else None
        state.ended = RunEnded(outcome=outcome, reason=reason, emergency=emergency, saver=saver)
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
