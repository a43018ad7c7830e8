"""A cluster without processes: the coordinator's machine, a manual clock and puppets for workers.

Tests say what happens (`join`, `answer_all`, `crash`, `pass_time`) and look at what the machine decided.
Every entry that the machine journals is kept, so that `restart` can replay it into a new machine.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.journal_records import (
    Entry,
    entry_from_json,
    entry_to_json,
    replay,
)
from tensorforge.elastic.coordinator.machine import inputs
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
"""More deadlines than any span of time in a test can hold; a deadline that stands still is a bug."""


@dataclass
class Puppet:
    """A worker whose every move the test makes; it keeps what it was sent."""

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
        """The newest message of that kind."""
        found = [message for message in self.received if isinstance(message, kind)]
        return found[-1] if found else None

    def take(self, message: Any) -> None:
        """Receive a message, following announcements as a real worker does."""
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
    """Drives one machine; instructions are carried out at once and in order."""

    def __init__(
        self, config: ElasticTrainingConfig, *, desired_workers: int | None = None
    ) -> None:
        self.config = config
        self.desired_workers = desired_workers
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
        return Machine(
            self.config,
            now=self.clock(),
            desired_workers=self.desired_workers,
            restored=replay(entries),
        )

    def feed(self, event: inputs.Input) -> list[Instruction]:
        """Hand one event to the machine and carry out what it says."""
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
        """What was journaled so far."""
        return [entry_from_json(line) for line in self.journal]

    # What workers do

    def join(self, name: str, *, host: str = "host", previous: Puppet | None = None) -> Puppet:
        """A new process says hello; or, with `previous`, one that was fenced as that puppet."""
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

    def hello(self, puppet: Puppet, generation: int | None, protocol: int = 1) -> None:
        """The first message on the puppet's stream."""
        message = messages.Hello(
            protocol=protocol,
            worker=puppet.worker,
            incarnation=puppet.incarnation,
            generation=generation,
            previous=puppet.previous,
            attributes={"pid": str(puppet.pid)},
        )
        self.feed(inputs.Received(puppet.connection, message))

    def reconnect(self, puppet: Puppet) -> None:
        """The same process opens another stream."""
        puppet.connection = next(self._connections)
        puppet.is_connected = True
        self._by_connection[puppet.connection] = puppet
        self.hello(puppet, puppet.generation)
        if self.machine.state.roster.by_connection(puppet.connection) is not None:
            self.puppets[puppet.id] = puppet

    def say(self, puppet: Puppet, kind: type[Any], **fields: Any) -> None:
        """Any message, with the puppet's incarnation and generation unless told otherwise."""
        fields.setdefault("incarnation", puppet.incarnation)
        fields.setdefault("generation", puppet.generation or 0)
        self.feed(inputs.Received(puppet.connection, kind(**fields)))

    def answer(self, puppet: Puppet, **fields: Any) -> None:
        """Stand at the barrier."""
        self.say(puppet, messages.Ready, **{"committed_step": puppet.step, **fields})

    def commit(self, puppet: Puppet, step: int) -> None:
        """Report a committed step."""
        puppet.step = step
        self.say(puppet, messages.Progress, epoch=0, step=step, learning_rate=0.1)

    def crash(self, puppet: Puppet, reason: str = "its stream broke") -> None:
        """The process dies: its stream breaks."""
        self.cut(puppet, reason)

    def cut(self, puppet: Puppet, reason: str = "its stream broke") -> None:
        """The stream breaks; whether the process is gone or trains on, nobody can see."""
        self._by_connection.pop(puppet.connection, None)
        puppet.is_connected = False
        if self.puppets.get(puppet.id) is puppet:
            del self.puppets[puppet.id]
        self.feed(inputs.Closed(puppet.connection, reason, self.clock()))

    # What all of them do

    def members(self) -> list[Puppet]:
        """The puppets of the current members, in order of rank."""
        names = [worker.id for worker in self.machine.state.roster.members]
        return [self.puppets[name] for name in names if name in self.puppets]

    def answer_all(self) -> None:
        """Every member answers the barrier."""
        for puppet in self.members():
            self.answer(puppet)

    def form_all(self) -> None:
        """Every member has formed."""
        for puppet in self.members():
            self.say(puppet, messages.Formed)

    def settle(self, step: int | None = None) -> None:
        """Carry the rescale to its end, and commit a step if one is given."""
        self.answer_all()
        self.form_all()
        if step is not None:
            for puppet in self.members():
                self.commit(puppet, step)

    # What else happens

    def pass_time(self, seconds: float, *, beating: bool = True) -> None:
        """Let time pass, with a tick at every deadline of the machine; streams stay alive if `beating`."""
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
        """Kill the coordinator and start another one on its journal; all streams break."""
        for puppet in self.puppets.values():
            puppet.is_connected = False
        self._by_connection.clear()
        self.machine = self._machine()
