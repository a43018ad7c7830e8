"""A cluster without processes: the coordinator's state machine, a manual clock and puppets as workers.

Tests say what happens (`join`, `answer_all`, `disconnect`, `pass_time`) and check what the machine decides. All
journal entries of the machine are kept, so that `restart` can replay them into a new machine.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.goal import Goal
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.journal_records import (
    Entry,
    entry_from_json,
    entry_to_json,
    replay,
)
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState
from tensorforge.elastic.coordinator.machine.instructions import (
    Close,
    Instruction,
    Note,
    Record,
    Send,
)
from tensorforge.elastic.coordinator.machine.machine import Machine
from tensorforge.elastic.protocol import messages
from tensorforge.testing.clock import ManualClock

Message = TypeVar("Message")

MOST_TICKS = 1_000
"""More deadlines than any test passes; reaching this limit means that a deadline does not advance."""


@dataclass
class Puppet:
    """A worker that the test controls; it keeps the messages that it receives."""

    worker: WorkerId
    incarnation: str
    connection: int
    previous: str | None = None
    pid: int = 0
    received: list[Any] = field(default_factory=list)
    generation: int | None = None
    members: tuple[WorkerId, ...] = ()
    step: int = -1
    is_connected: bool = True

    @property
    def id(self) -> str:
        """The worker's name."""
        return self.worker.id

    def last(self, kind: type[Message]) -> Message | None:
        """The newest message of this type."""
        found = [message for message in self.received if isinstance(message, kind)]
        return found[-1] if found else None

    def take(self, message: Any) -> None:
        """Receive a message, and follow rescale announcements as a real worker does."""
        self.received.append(message)
        if isinstance(message, messages.Rescale):
            if message.workers is not None:
                self.members = message.workers
            elif message.change is not None:
                self.members = messages.apply_change(self.members, message.change)
            self.generation = message.generation
        elif isinstance(message, messages.Welcome) and message.workers is not None:
            self.members, self.generation = message.workers, message.generation
        elif isinstance(message, messages.FormationNotice):
            self.step = max(self.step, message.target_step)


class SimulatedCluster:
    """Drives one machine and carries out its instructions at once and in order.

    `terms`, `goal` and `worker_config` are those that workers name when they join from then on.
    """

    def __init__(
        self, config: ElasticTrainingConfig, *, desired_workers: int | None = None
    ) -> None:
        self.config = config
        self.desired_workers = desired_workers
        self.terms: dict[str, str] = {}
        self.goal: Goal | None = None
        self.worker_config: ElasticTrainingConfig | None = None
        self.clock = ManualClock()
        self.journal: list[str] = []
        self.notes: list[Note] = []
        self.puppets: dict[str, Puppet] = {}
        self.machine = self._machine()
        self._connections = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._by_connection: dict[int, Puppet] = {}

    def _machine(self) -> Machine:
        entries = [entry_from_json(line) for line in self.journal]
        state = ClusterState(
            self.config,
            now=self.clock(),
            desired_workers=self.desired_workers,
            restored=replay(entries),
        )
        return Machine(state)

    def feed(self, event: inputs.Input) -> list[Instruction]:
        """Pass one event to the machine and carry out its instructions."""
        instructions = self.machine.handle(event, self.clock())
        for instruction in instructions:
            self._carry_out(instruction)
        return instructions

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Record):
            self.journal.append(entry_to_json(instruction.entry))
        elif isinstance(instruction, Note):
            self.notes.append(instruction)
        elif isinstance(instruction, Send):
            for connection in instruction.connections:
                if connection in self._by_connection:
                    self._by_connection[connection].take(instruction.message)
        elif isinstance(instruction, Close):
            puppet = self._by_connection.pop(instruction.connection, None)
            if puppet is not None and puppet.connection == instruction.connection:
                puppet.is_connected = False

    def entries(self) -> list[Entry]:
        """The journal entries so far."""
        return [entry_from_json(line) for line in self.journal]

    # One worker

    def join(self, name: str, *, host: str = "host", previous: Puppet | None = None) -> Puppet:
        """Connect a new process; with `previous`, the process of that puppet after it was fenced."""
        number = next(self._incarnations)
        worker = WorkerId(name, host, 1) if previous is None else previous.worker
        puppet = Puppet(worker, f"{name}-{number}", next(self._connections), pid=number)
        if previous is not None:
            puppet.previous, puppet.pid = previous.incarnation, previous.pid
        self._by_connection[puppet.connection] = puppet
        self.hello(puppet, None)
        if self.machine.state.roster.by_connection(puppet.connection) is not None:
            self.puppets[name] = puppet
        return puppet

    def hello(
        self, puppet: Puppet, generation: int | None, protocol: int = messages.PROTOCOL
    ) -> None:
        """Send the first message on the puppet's stream."""
        message = messages.Hello(
            protocol=protocol,
            worker=puppet.worker,
            incarnation=puppet.incarnation,
            generation=generation,
            previous=puppet.previous,
            attributes={"pid": str(puppet.pid)},
            terms=self.terms,
            goal=self.goal,
            config=self.worker_config,
        )
        self.feed(inputs.Received(puppet.connection, message))

    def reconnect(self, puppet: Puppet) -> None:
        """Open another stream for the same process."""
        puppet.connection = next(self._connections)
        puppet.is_connected = True
        self._by_connection[puppet.connection] = puppet
        self.hello(puppet, puppet.generation)
        if self.machine.state.roster.by_connection(puppet.connection) is not None:
            self.puppets[puppet.id] = puppet

    def say(self, puppet: Puppet, kind: type[Any], **fields: Any) -> None:
        """Send a message, by default with the puppet's incarnation and generation."""
        fields.setdefault("incarnation", puppet.incarnation)
        fields.setdefault("generation", puppet.generation or 0)
        self.feed(inputs.Received(puppet.connection, kind(**fields)))

    def answer(self, puppet: Puppet, **fields: Any) -> None:
        """Answer the rescale barrier."""
        self.say(puppet, messages.Ready, **{"committed_step": puppet.step, **fields})

    def commit(self, puppet: Puppet, step: int) -> None:
        """Report a committed step."""
        puppet.step = step
        self.say(puppet, messages.Progress, epoch=0, step=step, learning_rate=0.1)

    def disconnect(self, puppet: Puppet, reason: str = "its stream broke") -> None:
        """Break the stream; the machine cannot see whether the process has ended or still trains."""
        self._by_connection.pop(puppet.connection, None)
        puppet.is_connected = False
        if self.puppets.get(puppet.id) is puppet:
            del self.puppets[puppet.id]
        self.feed(inputs.Closed(puppet.connection, reason, self.clock()))

    # All workers

    def members(self) -> list[Puppet]:
        """The puppets of the current members, in the order of rank."""
        names = [worker.id for worker in self.machine.state.roster.members]
        return [self.puppets[name] for name in names if name in self.puppets]

    def answer_all(self) -> None:
        """Let every member answer the barrier."""
        for puppet in self.members():
            self.answer(puppet)

    def form_all(self) -> None:
        """Let every member report that it has formed."""
        for puppet in self.members():
            self.say(puppet, messages.Formed)

    def settle(self, step: int | None = None) -> None:
        """Complete the rescale, and commit `step` if it is given."""
        self.answer_all()
        self.form_all()
        if step is not None:
            for puppet in self.members():
                self.commit(puppet, step)

    # Time and the coordinator

    def pass_time(self, seconds: float, *, beating: bool = True) -> None:
        """Let time pass, with a tick at every deadline of the machine; `beating`: workers send heartbeats."""
        end = self.clock() + seconds
        for _ in range(MOST_TICKS):
            deadline = self.machine.next_deadline()
            beat = self.clock() + self.machine.state.timeouts.heartbeat
            moment = min(end, beat, end if deadline is None else max(deadline, self.clock()))
            while self.clock() < moment:  # a rounded difference may stop just short of it
                self.clock.advance(max(moment - self.clock(), math.ulp(moment)))
            if beating:
                alive = tuple(p.connection for p in self.puppets.values() if p.is_connected)
                self.feed(inputs.Alive(alive))
            self.feed(inputs.Tick())
            if moment >= end:
                return
        raise AssertionError(f"the machine's deadline {self.machine.next_deadline()} does not move")

    def restart(self) -> None:
        """Replace the machine by a new one with the same journal; all streams break."""
        for puppet in self.puppets.values():
            puppet.is_connected = False
        self._by_connection.clear()
        self.machine = self._machine()
