"""The coordinator as a pure state machine: an event and the time in, instructions out.

    GATHERING ──enough──> RESCALING ──all stopped──> FORMING ──all formed──> ACTIVE
                            ^   ^                       │                      │
                            │   └──── lost, left, joined, suspected ───────────┤
                          PAUSED <──── fewer than min_workers ─────────────────┤
                            └──too long──> ENDED <──all finished── FINISHING <─┘

A generation is decided once, journaled, announced, and then either formed by all its members or
superseded by the next one. Nothing here reads a clock, a socket or a random source: the same events at the
same times give the same instructions, which is what the property tests rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any

import msgspec

from tensorforge.cluster.config import ElasticTrainingConfig, RescaleType
from tensorforge.cluster.worker import WorkerId, WorkerStatus
from tensorforge.elastic import inputs, messages, records
from tensorforge.elastic.instructions import Close, Instruction, Note, Record, Send
from tensorforge.elastic.policy import check_target, join_deadline, worker_limit
from tensorforge.elastic.records import DurableState, RescaleRecord
from tensorforge.elastic.roster import Participant, Roster, arrange
from tensorforge.elastic.timeouts import Timeouts
from tensorforge.elastic.tolerance import Tolerance

MAX_PARTICIPANTS = 20_000
"""Workers and standbys that one coordinator keeps track of; the next one is refused."""


class Phase(Enum):
    """What the cluster as a whole is doing."""

    GATHERING = "gathering"
    RESCALING = "rescaling"
    FORMING = "forming"
    ACTIVE = "active"
    PAUSED = "paused"
    FINISHING = "finishing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why the members must change now."""

    text: str
    evidence_at: float
    is_failure: bool


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
        state = restored or DurableState(history=[])
        self.config = config
        self.timeouts = Timeouts.derive(config)
        self.roster = Roster()
        self.generation = state.generation
        self.formed_generation = state.formed_generation
        self.desired_workers = state.desired_workers or desired_workers
        self.history: list[RescaleRecord] = list(state.history)
        self.ended = state.ended
        self.progress = messages.State()
        self.tolerance = Tolerance(config)
        self.stale_messages = 0
        self.refusals = 0
        self._utc_origin = utc_origin
        self._formed_seats = frozenset((s.worker.id, s.incarnation) for s in state.formed_seats)
        self._answered: set[str] = set()
        self._formed: set[str] = set()
        self._moved: dict[str, int] = {}
        self._causes: list[_Cause] = []
        self._gone: dict[str, str] = {}
        self._suspicion: tuple[float, str] | None = None
        self._urgent = state.urgent
        self._barrier_failed = False
        self._committed = False
        self._early_commit: messages.Progress | None = None
        self._first_join: float | None = None
        self._last_change = now
        self._milestone = now
        self._silence_at: float | None = None
        self._deadline: float | None = None
        self._out: list[Instruction] = []
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
            messages.Formed: self._has_formed,
            messages.Suspect: self._suspected,
            messages.Leave: self._leaves,
            messages.Finish: self._finishes,
            messages.Abort: self._aborts,
        }
        self.phase = Phase.GATHERING
        self._restore(state, now)

    def handle(self, event: inputs.Input, now: float) -> list[Instruction]:
        """Take one event in and return what to do about it, in order."""
        self._out = []
        self._inputs[type(event)](event, now)
        self._decide(now)
        return self._out

    def next_deadline(self) -> float | None:
        """When to call `handle` with a `Tick` if nothing else happens before."""
        if self.phase is Phase.ENDED:
            return None
        times = [self._silence_at, self._deadline, self._join_deadline()]
        if self._suspicion is not None:
            times.append(self._suspicion[0])
        return min((time for time in times if time is not None), default=None)

    def utc(self, at: float) -> datetime:
        """The time as people read it."""
        return datetime.fromtimestamp(self._utc_origin + at, UTC)

    @property
    def limit(self) -> int | None:
        """The most members that the next generation may have."""
        return worker_limit(self.config, self.desired_workers)

    # Restarting

    def _restore(self, state: DurableState, now: float) -> None:
        if state.ended is not None:
            self.phase = Phase.ENDED
            return
        if state.committed is not None:
            self.progress = messages.State(
                epoch=state.committed.epoch,
                step=state.committed.step,
                learning_rate=state.committed.learning_rate,
                samples=state.committed.samples,
                global_batch_size=state.committed.global_batch_size,
            )
        if not state.seats and not state.paused:
            return
        is_formed = state.formed_generation == state.generation
        expected = now + self.timeouts.comeback - self.timeouts.silence
        for seat in state.seats:
            participant = Participant(seat.worker, seat.incarnation, now, last_seen=expected)
            participant.status = WorkerStatus.ACTIVE if is_formed else WorkerStatus.RESCALING
            self.roster.add(participant)
        self.roster.seat_members(tuple(seat.worker for seat in state.seats))
        self.tolerance.expect(len(state.seats))
        self._silence_at = now + self.timeouts.comeback
        if is_formed:
            self.phase = Phase.ACTIVE
            self._committed = state.committed is not None and (
                state.committed.generation == state.generation
            )
        else:
            self._open_barrier(now, paused=state.paused)

    # What comes in

    def _received(self, event: inputs.Received, now: float) -> None:
        message = event.message
        if isinstance(message, messages.Hello):
            self._hello(event.connection, message, now)
            return
        participant = self.roster.by_connection(event.connection)
        if participant is None and self.ended is not None:
            return
        if participant is None:
            code, why = messages.REFUSED_FENCED, "this stream belongs to no worker of the cluster"
            self._refuse(event.connection, code, why)
        elif participant.incarnation != message.incarnation:
            why = f"{participant.id} spoke as another process than the one that said hello"
            self._refuse(event.connection, messages.REFUSED_FENCED, why)
        else:
            participant.last_seen = now
            self._messages[type(message)](participant, message, now)

    def _hello(self, connection: int, hello: messages.Hello, now: float) -> None:
        known = self.roster.get(hello.worker.id)
        if hello.protocol != messages.PROTOCOL:
            why = f"protocol {hello.protocol} is spoken there, {messages.PROTOCOL} here"
            self._refuse(connection, messages.REFUSED_INVALID, why)
        elif self.ended is not None:
            self._send((connection,), self._ending())
            self._out.append(Close(connection))
        elif known is not None and known.incarnation == hello.incarnation:
            self._adopt(known, connection, hello, now)
        elif known is not None and known.connection is not None:
            why = f"a living worker has the id {hello.worker.id} ({known.worker})"
            self._refuse(connection, messages.REFUSED_DUPLICATE, why)
        else:
            if known is not None:
                self._lose(known, "its process was replaced by another one", now, now)
            self._newcomer(connection, hello, now)

    def _newcomer(self, connection: int, hello: messages.Hello, now: float) -> None:
        worker = hello.worker
        if hello.generation is not None:
            if self.phase is Phase.GATHERING:
                # It outlived a journal that is gone; its generations must not be used again.
                self.generation = max(self.generation, hello.generation)
            why = (
                f"{worker.id} believes to be a member of generation {hello.generation}, but it was "
                f"removed; the cluster is at generation {self.generation}: join again as a newcomer"
            )
            self._refuse(connection, messages.REFUSED_FENCED, why)
            return
        if len(self.roster) >= MAX_PARTICIPANTS:
            why = f"{MAX_PARTICIPANTS} workers and standbys are here already"
            self._refuse(connection, messages.REFUSED_FULL, why)
            return
        participant = Participant(worker, hello.incarnation, joined_at=now, last_seen=now)
        participant.connection = connection
        participant.local_world_size = hello.local_world_size
        participant.attributes = dict(hello.attributes)
        is_standby = self._room() == 0
        self.roster.add(participant)
        if self._first_join is None:
            self._first_join = now
        self._last_change = now
        self._watch_silence(now)
        self._welcome(participant, is_standby=is_standby)
        self._note("info", f"{worker} joined" + (" as a standby" if is_standby else ""))

    def _adopt(
        self, participant: Participant, connection: int, hello: messages.Hello, now: float
    ) -> None:
        if participant.worker != hello.worker:
            why = f"{hello.worker.id} was {participant.worker} and now says it is {hello.worker}"
            self._refuse(connection, messages.REFUSED_INVALID, why)
            return
        old = self.roster.connect(participant, connection)
        if old is not None:
            self._out.append(Close(old))
        participant.last_seen = now
        participant.local_world_size = hello.local_world_size
        participant.attributes = dict(hello.attributes)
        is_member = self.roster.is_member(participant.id)
        is_current = is_member and hello.generation == self.generation
        self._welcome(participant, is_current=is_current)
        if (is_member and not is_current) or participant.is_leaving:
            self._announce([participant], self.generation)
        if self.phase is Phase.FORMING and is_member:
            self._send((connection,), self._formation())
        self._note("info", f"{participant.worker} is back on a new stream")

    def _welcome(
        self, participant: Participant, *, is_current: bool = False, is_standby: bool = False
    ) -> None:
        if participant.connection is None:
            return
        if is_current:
            participant.known_generation = self.generation
        welcome = messages.Welcome(
            generation=self.generation,
            workers=self.roster.members if is_current else None,
            heartbeat_interval_ms=max(1, round(self.timeouts.heartbeat * 1000)),
            is_standby=is_standby,
            state=self.progress,
        )
        self._send((participant.connection,), welcome)

    def _heartbeat(self, who: Participant, message: messages.Heartbeat, _now: float) -> None:
        if who.connection is not None:
            self._send((who.connection,), messages.Pong(sequence=message.sequence))

    def _ready(self, who: Participant, message: messages.Ready, _now: float) -> None:
        if self._is_stale(who, message.generation) or not self.roster.is_member(who.id):
            return
        if self.phase in (Phase.RESCALING, Phase.PAUSED) and who.answer is None:
            who.answer = message
            self._answered.add(who.id)

    def _has_formed(self, who: Participant, message: messages.Formed, _now: float) -> None:
        if self._is_stale(who, message.generation) or not self.roster.is_member(who.id):
            return
        if self.phase is Phase.ACTIVE or who.id in self._formed:
            return
        self._formed.add(who.id)
        for name, amount in message.moved.items():
            self._moved[name] = self._moved.get(name, 0) + amount

    def _progressed(self, who: Participant, message: messages.Progress, now: float) -> None:
        if message.generation not in (self.generation, self.formed_generation):
            self._is_stale(who, message.generation)
            return
        who.progress = message
        if message.step >= self.progress.step:
            self.progress = messages.State(
                epoch=message.epoch,
                step=message.step,
                learning_rate=message.learning_rate,
                samples=message.samples,
                global_batch_size=message.global_batch_size,
            )
        if message.generation != self.generation or self._committed:
            return
        if self.phase is Phase.ACTIVE:
            self._first_commit(message, now)
        elif self.phase in (Phase.RESCALING, Phase.FORMING):
            self._early_commit = message

    def _first_commit(self, progress: messages.Progress, now: float) -> None:
        self._committed = True
        self.tolerance.forgive(len(self.roster.members))
        entry = records.WasCommitted(
            generation=self.generation,
            epoch=progress.epoch,
            step=progress.step,
            learning_rate=progress.learning_rate,
            samples=progress.samples,
            global_batch_size=progress.global_batch_size,
            first_commit_ms=self._lap(now),
        )
        self._record(entry)
        records.complete(self.history, entry)

    def _suspected(self, who: Participant, message: messages.Suspect, now: float) -> None:
        if self._is_stale(who, message.generation) or not self.roster.is_member(who.id):
            return
        if self.phase in (Phase.ACTIVE, Phase.FORMING) and self._suspicion is None:
            about = f" and suspects {message.worker_id}" if message.worker_id else ""
            text = f"{who.id} reports a broken collective{about}: {message.reason[:500]}"
            self._suspicion = (now + self.timeouts.suspicion, text)

    def _leaves(self, who: Participant, message: messages.Leave, now: float) -> None:
        self._dismiss(who, f"{who.id} leaves: {message.reason or 'it asked to'}", now)

    def _dismiss(self, who: Participant, why: str, now: float) -> None:
        if who.is_leaving or who.finished:
            return
        who.leave_reason = why
        who.move(WorkerStatus.LEAVING)
        if not self.roster.is_member(who.id):
            self._release(who)
        elif self.phase is not Phase.FINISHING:
            self._gone[who.id] = why
            self._causes.append(_Cause(why, now, is_failure=False))

    def _finishes(self, who: Participant, message: messages.Finish, now: float) -> None:
        if message.generation not in (self.generation, self.formed_generation):
            self._is_stale(who, message.generation)
            return
        who.finished = True
        if who.status is not WorkerStatus.LEAVING:
            who.move(WorkerStatus.LEAVING)
        if self.phase is not Phase.FINISHING and self.roster.is_member(who.id):
            self.phase = Phase.FINISHING
            self._deadline = now + self.timeouts.barrier
            self._causes.clear()
            self._note("info", f"{who.id} finished: {message.reason or 'training is complete'}")

    def _aborts(self, who: Participant, message: messages.Abort, now: float) -> None:
        text = f"{who.id} aborted: {message.reason}"
        if message.traceback:
            self._note("error", f"{text}\n{message.traceback}")
        if message.fatal:
            self._end("aborted", text, emergency=False)
        else:
            self._lose(who, f"its code raised: {message.reason}", now, now)

    def _closed(self, event: inputs.Closed, now: float) -> None:
        participant = self.roster.by_connection(event.connection)
        if participant is not None:
            self._lose(participant, event.reason, event.seen_at, now, is_open=False)

    def _alive(self, event: inputs.Alive, now: float) -> None:
        for connection in event.connections:
            participant = self.roster.by_connection(connection)
            if participant is not None:
                participant.last_seen = now

    def _exited(self, event: inputs.Exited, now: float) -> None:
        participant = self.roster.get(event.worker_id)
        pid = None if participant is None else participant.attributes.get("pid")
        if participant is not None and (event.pid is None or pid in (None, str(event.pid))):
            self._lose(participant, event.reason, now, now)

    def _scaled(self, event: inputs.ScaleRequested, now: float) -> None:
        self.desired_workers = check_target(self.config, event.workers)
        self._record(records.TargetSet(workers=event.workers, by=event.by))
        self._note("info", f"{event.by} wants {event.workers} workers")
        staying = [p for p in self.roster.present_members() if not p.is_leaving]
        for participant in staying[event.workers :]:
            why = f"{participant.id} retires: {event.by} wants {event.workers} workers"
            self._dismiss(participant, why, now)

    def _removed(self, event: inputs.RemovalRequested, now: float) -> None:
        participant = self.roster.get(event.worker_id)
        if participant is not None:
            self._dismiss(participant, f"{participant.id} retires: {event.by} asked for it", now)

    def _stopped(self, event: inputs.StopRequested, _now: float) -> None:
        if self.ended is None:
            self._end("stopped", f"{event.by} stopped the run: {event.reason}", emergency=True)

    def _announced(self, event: inputs.Announced, now: float) -> None:
        if event.generation == self.generation and self.history:
            record = self.history[-1]
            if record.generation == event.generation and record.decision_ms is None:
                record.decision_ms = self._lap(now)

    def _tick(self, _event: inputs.Tick, now: float) -> None:
        if self._silence_at is not None and now >= self._silence_at:
            self._find_silent(now)
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._run_out(now)

    def _find_silent(self, now: float) -> None:
        silent = [p for p in self.roster if now >= p.last_seen + self.timeouts.silence]
        for participant in silent:
            if participant.connection is None:
                wait = round(self.timeouts.comeback * 1000)
                why = f"it did not come back within {wait} ms of the coordinator's restart"
            else:
                why = f"no sign of life for {round((now - participant.last_seen) * 1000)} ms"
            self._lose(participant, why, participant.last_seen, now)
        oldest = min((p.last_seen for p in self.roster), default=None)
        self._silence_at = None if oldest is None else oldest + self.timeouts.silence

    def _run_out(self, now: float) -> None:
        wait = f"{round(self.timeouts.barrier * 1000)} ms"
        if self.phase in (Phase.RESCALING, Phase.FORMING):
            self._barrier_failed = True
            is_forming = self.phase is Phase.FORMING
            done = self._formed if is_forming else self._answered
            what = "form the new group" if is_forming else "answer the rescale barrier"
            for participant in self.roster.present_members():
                if participant.id not in done:
                    self._lose(participant, f"it did not {what} within {wait}", now, now)
        elif self.phase is Phase.PAUSED:
            count, least = len(self.roster.members), self.config.min_workers
            limit = round(self.timeouts.pause * 1000)
            why = (
                f"{count} workers for {limit} ms, at least {least} are needed (rescale_timeout_ms)"
            )
            self._end("aborted", why, emergency=True)
        elif self.phase is Phase.FINISHING:
            self._end("completed", "training is complete; some workers did not confirm it")

    # What goes wrong

    def _lose(
        self,
        who: Participant,
        why: str,
        evidence_at: float,
        now: float,
        *,
        is_open: bool = True,
    ) -> None:
        connection = self.roster.drop(who)
        if connection is not None and is_open:
            code = messages.REFUSED_FENCED
            self._refuse(connection, code, f"{who.id} was taken out of the cluster: {why}")
        if who.finished or self.phase in (Phase.FINISHING, Phase.ENDED):
            return
        self._last_change = now
        text = f"{who.id} failed: {why}"
        self._note("warning", text)
        if self.roster.is_member(who.id):
            self.tolerance.losses += 1
            self._gone[who.id] = text
            self._causes.append(_Cause(text, evidence_at, is_failure=True))
        elif who.is_leaving:
            # The others may be waiting for it in the last collective of the old generation.
            text = f"{who.id} failed while it was leaving: {why}"
            self._causes.append(_Cause(text, evidence_at, is_failure=True))

    def _is_stale(self, who: Participant, generation: int) -> bool:
        if generation == self.generation:
            return False
        self.stale_messages += 1
        why = f"generation {generation} is not {self.generation}, the current one"
        if who.connection is not None:
            self._send((who.connection,), messages.Stale(generation=self.generation, reason=why))
        self._note("info", f"{who.id}: a message was ignored: {why}")
        return True

    # What is decided

    def _decide(self, now: float) -> None:
        if self.phase is Phase.ENDED:
            return
        if self.phase is Phase.FINISHING:
            if all(p.finished for p in self.roster.present_members()):
                self._end("completed", "training is complete")
            return
        if self._suspicion is not None and now >= self._suspicion[0]:
            self._causes.append(_Cause(self._suspicion[1], now, is_failure=True))
        if self._causes:
            self._react(now)
        if self.phase in (Phase.RESCALING, Phase.PAUSED):
            self._close_barrier(now)
        if self.phase is Phase.FORMING and len(self._formed) >= len(self.roster.members):
            self._activate(now)
        joins = self._join_deadline()
        if joins is not None and now >= joins:
            self._take_in(now)

    def _react(self, now: float) -> None:
        causes, self._causes = self._causes, []
        is_failure = any(cause.is_failure for cause in causes)
        self._suspicion = None
        if is_failure:
            is_new = self.phase in (Phase.ACTIVE, Phase.FORMING) or self._barrier_failed
            verdict = self.tolerance.verdict(is_new_failure=is_new)
            if verdict is not None:
                facts = "; ".join(cause.text for cause in causes)
                self._end("aborted", f"{verdict}: {facts}", emergency=True)
                return
        self._barrier_failed = False
        evidence = min(cause.evidence_at for cause in causes)
        reason = "; ".join(cause.text for cause in causes)
        self._new_generation(now, reason, urgent=is_failure, evidence_at=evidence)

    def _room(self) -> int | None:
        staying = sum(1 for p in self.roster.present_members() if not p.is_leaving)
        if self.phase is Phase.GATHERING:
            staying = len(self.roster.waiting)
        return None if self.limit is None else max(0, self.limit - staying)

    def _join_deadline(self) -> float | None:
        waiting = len(self.roster.waiting)
        if not waiting or self.phase not in (Phase.GATHERING, Phase.ACTIVE, Phase.PAUSED):
            return None
        members = len(self.roster.members)
        if self.limit is not None and members >= self.limit:
            return None
        if self.phase is not Phase.ACTIVE:
            if members + waiting < self.config.min_workers:
                return None
            if self.phase is Phase.PAUSED:
                return self._last_change
            if self.limit is not None and waiting >= self.limit:
                return self._last_change
        return join_deadline(
            first_join=self._last_change if self._first_join is None else self._first_join,
            last_change=self._last_change,
            stability=self.timeouts.stability,
            patience=self.timeouts.pause,
        )

    def _take_in(self, now: float) -> None:
        names = ", ".join(list(self.roster.waiting)[:20])
        count = len(self.roster.waiting)
        if self.phase is Phase.GATHERING:
            reason = f"the first {count} workers are here"
        else:
            reason = f"{names} joined" if count <= 20 else f"{names} and {count - 20} more joined"
        self._new_generation(now, reason, urgent=False, evidence_at=now)

    def _new_generation(self, now: float, reason: str, *, urgent: bool, evidence_at: float) -> None:
        old, old_generation = self.roster.members, self.generation
        staying = {p.id for p in self.roster.present_members() if not p.is_leaving}
        room = None if self.limit is None else max(0, self.limit - len(staying))
        newcomers = tuple(p.worker for p in self.roster.waiting.values())[:room]
        members = arrange(old, staying, newcomers)
        self.generation += 1
        self.roster.seat_members(members)
        present = self.roster.present_members()
        for participant in present:
            participant.answer = None
            participant.move(WorkerStatus.RESCALING)
        self._urgent = self._urgent or urgent
        self._first_join = now if self.roster.waiting else None
        paused = len(members) < self.config.min_workers
        entry = records.Decided(
            generation=self.generation,
            old_generation=old_generation,
            seats=tuple(p.seat for p in present),
            type=_kind(old, members).value,
            reason=reason,
            urgent=self._urgent,
            paused=paused,
            added=tuple(worker.id for worker in newcomers),
            removed=dict(self._gone),
            old_size=len(old),
            detection_ms=max(0.0, (now - evidence_at) * 1000),
            decided_at=self.utc(now).isoformat(timespec="milliseconds"),
        )
        self._gone = {}
        self._record(entry)
        self.history = [*self.history[-(records.HISTORY - 1) :], RescaleRecord.opened_by(entry)]
        self._note("info", f"generation {self.generation}: {len(members)} workers: {reason}")
        self._open_barrier(now, paused=paused)
        self._announce([*present, *self.roster.leavers()], old_generation, old)

    def _open_barrier(self, now: float, *, paused: bool) -> None:
        self._answered, self._formed, self._moved = set(), set(), {}
        self._committed, self._early_commit, self._suspicion = False, None, None
        self._milestone = now
        if not paused:
            self._deadline = now + self.timeouts.barrier
            self.phase = Phase.RESCALING
        elif self.phase is not Phase.PAUSED:
            self._deadline = now + self.timeouts.pause
            self.phase = Phase.PAUSED

    def _announce(
        self,
        recipients: list[Participant],
        old_generation: int,
        old: tuple[WorkerId, ...] | None = None,
    ) -> None:
        knowing: list[int] = []
        others: list[int] = []
        change = None if old is None else messages.change_between(old, self.roster.members)
        for participant in recipients:
            if participant.connection is None:
                continue
            knows = change is not None and participant.known_generation == old_generation
            (knowing if knows else others).append(participant.connection)
            participant.known_generation = self.generation
        whole = messages.Rescale(
            generation=self.generation,
            old_generation=old_generation,
            workers=self.roster.members,
            urgent=self._urgent,
            paused=self.phase is Phase.PAUSED,
            reason=self.history[-1].reason,
            decided_at=datetime.fromisoformat(self.history[-1].decided_at),
        )
        if knowing:
            short = msgspec.structs.replace(whole, workers=None, change=change)
            self._send(tuple(knowing), short)
        if others:
            self._send(tuple(others), whole)

    def _close_barrier(self, now: float) -> None:
        if len(self._answered) < len(self.roster.members):
            return
        for participant in self.roster.leavers():
            self._release(participant)
        if self.phase is Phase.PAUSED:
            return
        self.history[-1].barrier_ms = self._lap(now)
        self.phase = Phase.FORMING
        self._deadline = now + self.timeouts.barrier
        members = self.roster.present_members()
        streams = tuple(p.connection for p in members if p.connection is not None)
        self._send(streams, self._formation())

    def _formation(self) -> messages.FormationNotice:
        reports = []
        for participant in self.roster.present_members():
            answer = participant.answer
            if answer is None:
                raise AssertionError(f"{participant.id} is forming without having answered")
            seat = (participant.id, participant.incarnation)
            reports.append(
                messages.MemberReport(
                    committed_step=answer.committed_step,
                    prepared_step=answer.prepared_step,
                    attributes=answer.attributes,
                    is_newcomer=seat not in self._formed_seats,
                )
            )
        veterans = [r.committed_step for r in reports if not r.is_newcomer]
        steps = veterans or [r.committed_step for r in reports]
        distinct, runs = messages.distinct_runs(reports)
        return messages.FormationNotice(
            generation=self.generation,
            distinct=distinct,
            runs=runs,
            target_step=max(steps),
            state=self.progress,
        )

    def _activate(self, now: float) -> None:
        self.phase = Phase.ACTIVE
        self._deadline = None
        self._urgent = False
        self.formed_generation = self.generation
        members = self.roster.present_members()
        self._formed_seats = frozenset((p.id, p.incarnation) for p in members)
        self.tolerance.expect(len(members))
        for participant in members:
            participant.move(WorkerStatus.ACTIVE)
        record = self.history[-1]
        entry = records.WasFormed(
            generation=self.generation,
            decision_ms=record.decision_ms or 0.0,
            barrier_ms=record.barrier_ms or 0.0,
            forming_ms=self._lap(now),
            moved=dict(self._moved),
        )
        self._record(entry)
        records.complete(self.history, entry)
        self._note("info", f"generation {self.generation} is active")
        if self._early_commit is not None:
            self._first_commit(self._early_commit, now)

    def _release(self, participant: Participant) -> None:
        connection = self.roster.drop(participant)
        reason = participant.leave_reason or "it is not needed any more"
        self._note("info", f"{participant.id} is released: {reason}")
        if connection is not None:
            self._send((connection,), messages.Released(reason=reason))
            self._out.append(Close(connection))

    def _end(self, outcome: str, reason: str, *, emergency: bool = False) -> None:
        self.ended = records.RunEnded(outcome=outcome, reason=reason, emergency=emergency)
        self.phase = Phase.ENDED
        self._deadline = self._silence_at = self._suspicion = None
        self._causes.clear()
        self._record(self.ended)
        self._note("info" if outcome == "completed" else "error", f"the run {outcome}: {reason}")
        everybody = [p for p in self.roster if p.connection is not None]
        streams = tuple(p.connection for p in everybody if p.connection is not None)
        if streams:
            self._send(streams, self._ending())
        for participant in everybody:
            self.roster.drop(participant)
        self._out.extend(Close(stream) for stream in streams)

    def _ending(self) -> messages.Ended:
        ended = self.ended or records.RunEnded(outcome="stopped", reason="")
        return messages.Ended(outcome=ended.outcome, reason=ended.reason, emergency=ended.emergency)

    # Small things

    def _watch_silence(self, now: float) -> None:
        if self._silence_at is None:
            self._silence_at = now + self.timeouts.silence

    def _lap(self, now: float) -> float:
        milliseconds = max(0.0, (now - self._milestone) * 1000)
        self._milestone = now
        return milliseconds

    def _refuse(self, connection: int, code: str, why: str) -> None:
        self.refusals += 1
        self._send((connection,), messages.Refused(code=code, reason=why))
        self._out.append(Close(connection))
        self._note("warning", f"refused ({code}): {why}")

    def _send(self, connections: tuple[int, ...], message: messages.FromCoordinator) -> None:
        self._out.append(Send(connections, message))

    def _record(self, entry: records.Entry) -> None:
        self._out.append(Record(entry))

    def _note(self, level: str, text: str) -> None:
        self._out.append(Note(level, text))


def _kind(old: tuple[WorkerId, ...], new: tuple[WorkerId, ...]) -> RescaleType:
    if len(new) == len(old):
        return RescaleType.REPLACE
    return RescaleType.SCALE_UP if len(new) > len(old) else RescaleType.SCALE_DOWN
