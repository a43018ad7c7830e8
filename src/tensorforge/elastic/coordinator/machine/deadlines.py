"""What is due when no input comes: silent workers, barriers that do not close, pauses that last too long."""

from __future__ import annotations

from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState, Phase
from tensorforge.elastic.coordinator.machine.departures import Departures
from tensorforge.elastic.coordinator.machine.generations import Generations
from tensorforge.elastic.protocol.reasons import RunOutcome
from tensorforge.wording import counted


class Deadlines:
    """Says when the machine needs its next `Tick`, and acts on the deadlines that have passed."""

    def __init__(
        self, state: ClusterState, departures: Departures, generations: Generations
    ) -> None:
        self._state = state
        self._departures = departures
        self._generations = generations

    def next(self) -> float | None:
        """The next moment at which something is due; `None` if nothing is."""
        state = self._state
        if state.phase is Phase.ENDED:
            return None
        times = [state.silence_at, state.deadline, self._generations.join_deadline()]
        if state.suspicion is not None:
            times.append(state.suspicion.due)
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        state = self._state
        if state.silence_at is not None and now >= state.silence_at:
            self._lose_silent(now)
        if state.deadline is not None and now >= state.deadline:
            state.deadline = None
            self._end_wait(now)

    def _lose_silent(self, now: float) -> None:
        state, silence = self._state, self._state.timeouts.silence
        for participant in [p for p in state.roster if now >= p.last_seen + silence]:
            if participant.connection is None:
                wait = round(state.timeouts.comeback * 1000)
                why = f"it did not come back within {wait} ms of the coordinator's restart"
            else:
                why = f"no sign of life for {round((now - participant.last_seen) * 1000)} ms"
            self._departures.lose(participant, why, participant.last_seen, now)
        oldest = min((p.last_seen for p in state.roster), default=None)
        state.silence_at = None if oldest is None else oldest + silence

    def _end_wait(self, now: float) -> None:
        phase = self._state.phase
        if phase is Phase.RESCALING:
            self._lose_late("answer the rescale barrier", set(self._state.barrier.answers), now)
        elif phase is Phase.FORMING:
            self._lose_late("form the new group", self._state.barrier.formed, now)
        elif phase is Phase.PAUSED:
            self._end_pause()
        elif phase is Phase.FINISHING:
            self._departures.finished_alone(now)

    def _lose_late(self, what: str, done: set[str], now: float) -> None:
        state = self._state
        state.barrier.has_failed = True
        wait = f"{round(state.timeouts.barrier * 1000)} ms"
        for participant in state.roster.present_members():
            if participant.id not in done:
                why = f"it did not {what} within {wait}"
                self._departures.lose(participant, why, now, now)

    def _end_pause(self) -> None:
        state = self._state
        count, least = len(state.roster.members), state.config.min_workers
        limit = round(state.timeouts.pause * 1000)
        why = f"{counted(count, 'worker')} for {limit} ms, at least {least} are needed (rescale_timeout_ms)"
        unseen = self._generations.unseen_group()
        if unseen is not None:
            why = (
                f"no member of generation {unseen} came back within {limit} ms (rescale_timeout_ms), and none "
                f"is known to have stopped: they may still be training where this coordinator cannot see them, "
                f"so no other group may start; if they are gone, start the coordinator again with --again"
            )
        self._departures.end(RunOutcome.ABORTED, why, emergency=True)
