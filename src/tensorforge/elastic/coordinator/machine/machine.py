"""The coordinator as a pure state machine: an event and the time in, instructions out.

    GATHERING ──enough──> RESCALING ──all stopped──> FORMING ──all formed──> ACTIVE
                            ^   ^                       │                      │
                            │   └──── lost, left, joined, suspected ───────────┤
                          PAUSED <──── fewer than min_workers ─────────────────┤
                            └──too long──> ENDED <──all finished── FINISHING <─┘

A generation is decided once, journaled, announced, and then either formed by all its members or
superseded by the next one. Nothing here reads a clock, a socket or a random source: the same events at the
same times give the same instructions, which is what the property tests rely on.

The machine takes events apart; its parts, around one `ClusterState`, know what follows:

admission.py     who is let in
departures.py    who goes, and how the run ends
generations.py   when the next generation comes, and who is in it
deadlines.py     what is due when nothing happens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerStatus
from tensorforge.elastic.coordinator import journal_records
from tensorforge.elastic.coordinator.journal_records import DurableState
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.admission import Admission
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState, Phase, Suspicion
from tensorforge.elastic.coordinator.machine.deadlines import Deadlines
from tensorforge.elastic.coordinator.machine.departures import Departures
from tensorforge.elastic.coordinator.machine.generations import Generations
from tensorforge.elastic.coordinator.machine.instructions import Instruction
from tensorforge.elastic.coordinator.machine.rescale_policy import check_target
from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.protocol import messages
from tensorforge.errors import ConflictError
from tensorforge.wording import counted


class Machine:
    """Membership, generations and rescales of one run.

    `restored` is what the journal of an earlier coordinator adds up to. `utc_origin` is the UTC time, in
    seconds, at which `now` was 0; it only dates the records. Call `handle` with times that never go back,
    and with a `Tick` at `next_deadline()` at the latest.
    """

    def __init__(
        self,
        config: ElasticTrainingConfig,
        *,
        now: float,
        desired_workers: int | None = None,
        restored: DurableState | None = None,
        utc_origin: float = 0.0,
    ) -> None:
        if desired_workers is not None:
            check_target(config, desired_workers)
        self.state = ClusterState(
            config,
            now=now,
            desired_workers=desired_workers,
            restored=restored,
            utc_origin=utc_origin,
        )
        self._departures = Departures(self.state)
        self._generations = Generations(self.state, self._departures)
        self._admission = Admission(self.state, self._departures, self._generations)
        self._deadlines = Deadlines(self.state, self._departures, self._generations)
        self._inputs: dict[type, Callable[[Any, float], None]] = {
            inputs.Received: self._received,
            inputs.Closed: self._closed,
            inputs.Alive: self._alive,
            inputs.Exited: self._exited,
            inputs.ScaleRequested: self._scaled,
            inputs.RemovalRequested: self._removed,
            inputs.StopRequested: self._stopped,
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
        """Take one event in and return what to do about it, in order."""
        self._inputs[type(event)](event, now)
        self._generations.decide(now)
        return self.state.out.take()

    def next_deadline(self) -> float | None:
        """When to call `handle` with a `Tick` if nothing else happens before."""
        return self._deadlines.next()

    # What workers say

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
            why = f"{participant.id} spoke as another process than the one that said hello"
            out.refuse(event.connection, messages.REFUSED_FENCED, why)
        else:
            participant.last_seen = now
            self._messages[type(message)](participant, message, now)

    def _heartbeat(self, who: Participant, message: messages.Heartbeat, _now: float) -> None:
        if who.connection is not None:
            self.state.out.send((who.connection,), messages.Pong(sequence=message.sequence))

    def _ready(self, who: Participant, message: messages.Ready, _now: float) -> None:
        state = self.state
        if state.ignores(who, message.generation):
            return
        if state.phase in (Phase.RESCALING, Phase.PAUSED):
            state.open_groups.stands_at_barrier(who.seat, message.generation)
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
        # Nobody goes back while one member knows the way; if all of them are new, the first step tells.
        is_first = message.generation == state.generation and not state.has_committed
        if is_first or message.step >= state.progress.step:
            state.progress = messages.State(
                epoch=message.epoch,
                step=message.step,
                learning_rate=message.learning_rate,
                samples=message.samples,
                global_batch_size=message.global_batch_size,
            )
        if message.generation == state.generation:
            self._generations.committed(message, now)

    def _suspected(self, who: Participant, message: messages.Suspect, now: float) -> None:
        state = self.state
        if state.ignores(who, message.generation) or not state.roster.is_member(who.id):
            return
        if state.phase in (Phase.ACTIVE, Phase.FORMING) and state.suspicion is None:
            about = f" and suspects {message.worker_id}" if message.worker_id else ""
            text = f"{who.id} reports a broken collective{about}: {message.reason[:500]}"
            state.suspicion = Suspicion(now + state.timeouts.suspicion, text)

    def _leaves(self, who: Participant, message: messages.Leave, now: float) -> None:
        why = f"{who.id} leaves: {message.reason or 'it asked to'}"
        self._departures.dismiss(who, why, now)

    def _finishes(self, who: Participant, message: messages.Finish, now: float) -> None:
        state = self.state
        if message.generation not in (state.generation, state.formed_generation):
            state.ignores(who, message.generation)
            return
        who.finished = True
        who.move(WorkerStatus.LEAVING)
        if state.phase is not Phase.FINISHING and state.roster.is_member(who.id):
            state.phase = Phase.FINISHING
            state.deadline = now + state.timeouts.barrier
            state.causes.clear()
            state.out.note("info", f"{who.id} finished: {message.reason or 'training is complete'}")

    def _aborts(self, who: Participant, message: messages.Abort, now: float) -> None:
        text = f"{who.id} aborted: {message.reason}"
        if message.traceback:
            self.state.out.note("error", f"{text}\n{message.traceback}")
        if message.fatal:
            self._departures.end("aborted", text)
        else:
            self.state.open_groups.stopped(who.id, who.incarnation)
            self._departures.lose(who, f"its code raised: {message.reason}", now, now)

    # What the shell and launchers see

    def _closed(self, event: inputs.Closed, now: float) -> None:
        participant = self.state.roster.by_connection(event.connection)
        if participant is not None:
            self._departures.lose(participant, event.reason, event.seen_at, now, is_open=False)

    def _alive(self, event: inputs.Alive, now: float) -> None:
        for connection in event.connections:
            participant = self.state.roster.by_connection(connection)
            if participant is not None:
                participant.last_seen = now

    def _exited(self, event: inputs.Exited, now: float) -> None:
        participant = self.state.roster.get(event.worker_id)
        pid = None if participant is None else participant.attributes.get("pid")
        if participant is not None and (event.pid is None or pid in (None, str(event.pid))):
            self.state.open_groups.stopped(participant.id, participant.incarnation)
            self._departures.lose(participant, event.reason, now, now)
        else:
            self.state.open_groups.exited(event.worker_id, event.pid)

    def _announced(self, event: inputs.Announced, now: float) -> None:
        if event.generation == self.state.generation:
            self.state.rescale_log.announced(event.generation, now)

    def _tick(self, _event: inputs.Tick, now: float) -> None:
        self._deadlines.pass_by(now)

    # What operators want

    def _scaled(self, event: inputs.ScaleRequested, now: float) -> None:
        state = self.state
        if event.expected not in (None, state.target_version):
            raise ConflictError(
                f"{event.by} did not know that {state.desired_workers} workers are wanted by now; "
                f"its wish for {event.workers} is not followed"
            )
        state.desired_workers = check_target(state.config, event.workers)
        state.target_version += 1
        state.target_by = event.by
        state.out.record(journal_records.TargetSet(workers=event.workers, by=event.by))
        wish = f"{event.by} wants {counted(event.workers, 'worker')}"
        state.out.note("info", wish)
        for participant in state.staying()[event.workers :]:
            self._departures.dismiss(participant, f"{participant.id} retires: {wish}", now)

    def _removed(self, event: inputs.RemovalRequested, now: float) -> None:
        participant = self.state.roster.get(event.worker_id)
        if participant is not None:
            why = f"{participant.id} retires: {event.by} asked for it"
            self._departures.dismiss(participant, why, now)

    def _stopped(self, event: inputs.StopRequested, _now: float) -> None:
        if self.state.ended is None:
            why = f"{event.by} stopped the run: {event.reason}"
            self._departures.end("stopped", why, emergency=True)
