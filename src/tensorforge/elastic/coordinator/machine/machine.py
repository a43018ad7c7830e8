"""The coordinator as a pure state machine: an input and the time go in, instructions come out.

    GATHERING ──enough──> RESCALING ──all stopped──> FORMING ──all formed──> ACTIVE
                            ^   ^                       │                      │
                            │   └──── lost, left, joined, suspected ───────────┤
                          PAUSED <──── fewer than min_workers ─────────────────┤
                            └──too long──> ENDED <──all finished── FINISHING <─┘

A generation is decided once, journaled, announced, and then either formed by all its members or superseded
by the next one. Nothing here reads a clock, a socket or a random source: the same inputs at the same times
give the same instructions. The property tests rely on that.

The machine sorts the inputs. Its parts share one `ClusterState` and decide what follows:

admission.py     which streams are accepted
departures.py    which workers leave, and how the run ends
generations.py   when the next generation comes, and who is a member of it
deadlines.py     what is due when no input comes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorforge.elastic.coordinator.journal_records import TargetSet
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.admission import Admission
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState, Phase, Suspicion
from tensorforge.elastic.coordinator.machine.deadlines import Deadlines
from tensorforge.elastic.coordinator.machine.departures import Departures
from tensorforge.elastic.coordinator.machine.generations import Generations
from tensorforge.elastic.coordinator.machine.instructions import Instruction
from tensorforge.elastic.coordinator.machine.rescale_policy import check_target
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol import commands, messages
from tensorforge.elastic.protocol.reasons import DepartureKind, RunOutcome
from tensorforge.errors import ConflictError
from tensorforge.wording import counted


class Machine:
    """Membership, generations and rescales of one run.

    Times given to `handle` must never go back, and a `Tick` must come at `next_deadline()` at the latest.
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self._departures = Departures(state)
        self._generations = Generations(state, self._departures)
        self._admission = Admission(state, self._departures, self._generations)
        self._deadlines = Deadlines(state, self._departures, self._generations)
        self._inputs: dict[type, Callable[[Any, float], None]] = {
            inputs.Received: self._received,
            inputs.Closed: self._closed,
            inputs.Alive: self._alive,
            commands.ReportExit: self._exited,
            commands.Scale: self._scale,
            commands.Remove: self._remove,
            commands.Stop: self._stop,
            inputs.Announced: self._announced,
            inputs.Tick: self._tick,
        }
        self._messages: dict[type, Callable[[Participant, Any, float], None]] = {
            messages.Heartbeat: self._heartbeat,
            messages.Progress: self._progressed,
            messages.Ready: self._ready,
            messages.Formed: self._formed,
            messages.Suspect: self._suspected,
            messages.Leave: self._leaves,
            messages.Finish: self._finishes,
            messages.Abort: self._aborts,
        }

    def handle(self, event: inputs.Input, now: float) -> list[Instruction]:
        """Take one input and return what to do about it, in order."""
        self._inputs[type(event)](event, now)
        self._generations.decide(now)
        return self.state.out.take()

    def next_deadline(self) -> float | None:
        """When to call `handle` with a `Tick` at the latest; `None` if nothing is due."""
        return self._deadlines.next()

    # Messages of workers

    def _received(self, event: inputs.Received, now: float) -> None:
        message, out = event.message, self.state.out
        if isinstance(message, messages.Hello):
            self._admission.hello(event.connection, message, now)
            return
        participant = self.state.roster.by_connection(event.connection)
        if participant is None:
            if self.state.ended is None:
                why = "this stream belongs to no worker of the cluster"
                out.refuse(event.connection, messages.REFUSED_FENCED, why)
        elif participant.incarnation != message.incarnation:
            why = f"{participant.id} sent a message of another process than its hello"
            out.refuse(event.connection, messages.REFUSED_FENCED, why)
        else:
            participant.last_seen = now
            self._messages[type(message)](participant, message, now)

    def _heartbeat(self, who: Participant, message: messages.Heartbeat, _now: float) -> None:
        if who.connection is not None:
            self.state.out.send((who.connection,), messages.Pong(sequence=message.sequence))

    def _ready(self, who: Participant, message: messages.Ready, now: float) -> None:
        state = self.state
        if state.ignores(who, message.generation):
            return
        if state.phase is Phase.FINISHING and state.holds_state(who) and not who.finished:
            state.suspicion = Suspicion(now, f"{who.id} goes on although others have finished")
        if state.phase in (Phase.RESCALING, Phase.PAUSED):
            state.open_groups.at_barrier(who.seat, message.generation)
            if state.roster.is_member(who.id):
                state.barrier.answer(who.id, message)

    def _formed(self, who: Participant, message: messages.Formed, _now: float) -> None:
        state = self.state
        if state.ignores(who, message.generation) or not state.roster.is_member(who.id):
            return
        if state.phase is not Phase.ACTIVE:
            state.barrier.form(who.id, message)

    def _progressed(self, who: Participant, message: messages.Progress, now: float) -> None:
        state = self.state
        if message.generation not in (state.generation, state.formed_generation):
            state.ignores(who, message.generation)
            return
        who.progress = message
        # The step never goes back while a member knows it; if all members are new, their first step counts.
        is_first = message.generation == state.generation and not state.has_committed
        if is_first or message.step >= state.progress.step:
            state.take_progress(message)
        if message.generation == state.generation:
            self._generations.committed(message, now)

    def _suspected(self, who: Participant, message: messages.Suspect, now: float) -> None:
        state = self.state
        if state.ignores(who, message.generation) or not state.roster.is_member(who.id):
            return
        may_suspect = state.phase in (Phase.ACTIVE, Phase.FORMING)
        if state.phase is Phase.FINISHING and not who.finished:
            may_suspect = True
        if may_suspect and state.suspicion is None:
            about = f" and suspects {message.worker_id}" if message.worker_id else ""
            text = f"{who.id} reports a broken collective{about}: {message.reason[:500]}"
            state.suspicion = Suspicion(now + state.timeouts.suspicion, text)

    def _leaves(self, who: Participant, message: messages.Leave, now: float) -> None:
        state = self.state
        if message.stops_if_last and self._is_last(who, together=message.together):
            why = "no other worker can take over the state of this one"
            if who.connection is not None:
                state.out.send((who.connection,), messages.LeaveRefused(reason=why))
            state.out.note("info", f"{who.id} cannot leave: {why}")
            return
        departure = self.state.departure(DepartureKind.LEFT, who, detail=message.reason)
        self._departures.dismiss(who, departure, now)

    def _is_last(self, who: Participant, *, together: bool) -> bool:
        """Whether the state of this member would be lost if it left; `together`: all members leave."""
        state = self.state
        if not state.roster.is_member(who.id) or not state.holds_state(who):
            return False
        stays = [p for p in state.staying() if p is not who]
        if together:
            stays = [p for p in stays if not state.holds_state(p)]
        return not stays and not state.roster.waiting

    def _finishes(self, who: Participant, message: messages.Finish, now: float) -> None:
        state = self.state
        if message.generation not in (state.generation, state.formed_generation):
            state.ignores(who, message.generation)
            return
        counts = self._departures.finish(who, message)
        if counts and state.phase is not Phase.FINISHING:
            state.phase = Phase.FINISHING
            state.deadline = now + state.timeouts.barrier
            state.causes.clear()

    def _aborts(self, who: Participant, message: messages.Abort, now: float) -> None:
        text = f"{who.id} aborted: {message.reason}"
        if message.traceback:
            self.state.out.note("error", f"{text}\n{message.traceback}")
        if message.fatal:
            self._departures.end(RunOutcome.ABORTED, text)
        else:
            self.state.open_groups.stopped(who.id, who.incarnation)
            self._departures.lose(who, f"its code raised: {message.reason}", now, now)

    # What the control server notices

    def _closed(self, event: inputs.Closed, now: float) -> None:
        participant = self.state.roster.by_connection(event.connection)
        if participant is not None:
            self._departures.lose(participant, event.reason, event.seen_at, now, is_open=False)

    def _alive(self, event: inputs.Alive, now: float) -> None:
        for connection in event.connections:
            participant = self.state.roster.by_connection(connection)
            if participant is not None:
                participant.last_seen = now

    def _announced(self, event: inputs.Announced, now: float) -> None:
        if event.generation == self.state.generation:
            self.state.rescale_log.announced(event.generation, now)

    def _tick(self, _event: inputs.Tick, now: float) -> None:
        self._deadlines.expire(now)

    # Commands of operators and launchers

    def _exited(self, command: commands.ReportExit, now: float) -> None:
        participant = self.state.roster.get(command.worker_id)
        pid = None if participant is None else participant.attributes.get("pid")
        if participant is not None and (command.pid is None or pid in (None, str(command.pid))):
            self.state.open_groups.stopped(participant.id, participant.incarnation)
            self._departures.lose(participant, command.reason, now, now)
        else:
            self.state.open_groups.exited(command.worker_id, command.pid)

    def _scale(self, command: commands.Scale, now: float) -> None:
        state = self.state
        if command.expected not in (None, state.target_version):
            raise ConflictError(
                f"refused {command.workers} workers: the target changed to {state.desired_workers} "
                f"since this request was made; ask again"
            )
        state.desired_workers = check_target(state.config, command.workers)
        state.target_version += 1
        state.target_by, state.target_requester = command.by, command.requester
        entry = TargetSet(workers=command.workers, by=command.by, requester=command.requester)
        state.out.record(entry)
        state.out.note("info", f"{command.by} wants {counted(command.workers, 'worker')}")
        for who in state.staying()[command.workers :]:
            facts = {"by": command.by, "workers": command.workers}
            departure = state.departure(DepartureKind.SURPLUS, who, **facts)
            self._departures.dismiss(who, departure, now)

    def _remove(self, command: commands.Remove, now: float) -> None:
        who = self.state.roster.get(command.worker_id)
        if who is not None:
            departure = self.state.departure(DepartureKind.REMOVED, who, by=command.by)
            self._departures.dismiss(who, departure, now)

    def _stop(self, command: commands.Stop, _now: float) -> None:
        if self.state.ended is None:
            why = f"{command.by} stopped the run: {command.reason}"
            self._departures.end(RunOutcome.STOPPED, why, emergency=True)
