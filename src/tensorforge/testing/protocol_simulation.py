"""The whole control protocol without sockets, driven by a schedule that a seed makes.

The coordinator's machine and the real worker classes are connected by a simulated network: messages are late,
connections break and are noticed at different times on both ends, and messages of an old connection arrive
beside those of a new one. Workers and the coordinator crash and start again; the coordinator keeps its journal
only, and has a clock of its own. The training code of each worker is modelled: a step is contributed to,
prepared, voted for and committed by all members of a group, and each part is one action of the schedule.

The invariants of `docs/protocol.md` are checked after every action. The first that does not hold is a
`Violation`.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.rescaling import RescalingEvent
from tensorforge.cluster.workers import WorkerId
from tensorforge.elastic.coordinator.journal_records import (
    Decided,
    entry_from_json,
    entry_to_json,
    replay,
)
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState
from tensorforge.elastic.coordinator.machine.instructions import (
    Close,
    Instruction,
    Record,
    Send,
)
from tensorforge.elastic.coordinator.machine.machine import Machine
from tensorforge.elastic.protocol import commands, messages
from tensorforge.elastic.protocol.timeouts import Timeouts
from tensorforge.elastic.worker.worker import ElasticWorker

Action = tuple[str, int]

CONFIG = ElasticTrainingConfig(
    stability_window_ms=300,
    worker_heartbeat_timeout_ms=3_000,
    rescale_timeout_ms=10_000,
    failure_tolerance_percentage=100,
    max_consecutive_failures=1_000,
)
WORKERS = 4
ACTIONS = 160
WEIGHTS = {
    "advance": 40,
    "deliver_to_coordinator": 22,
    "deliver_to_worker": 22,
    "pass_time": 8,
    "connect": 8,
    "notice_break": 5,
    "beat": 2,
    "start_worker": 3,
    "cut": 1.5,
    "crash": 0.8,
    "see_exit": 2,
    "leave": 0.3,
    "crash_coordinator": 0.5,
    "crash_between_journal_and_sending": 0.5,
    "start_coordinator": 3,
}
MOST_ROUNDS = 300
"""How many rounds with a healthy network may pass until a step is committed."""


class Violation(AssertionError):  # noqa: N818  a test reads better with it
    """An invariant of the protocol does not hold."""


def schedule_of(seed: int, actions: int = ACTIONS) -> list[Action]:
    """The schedule of a seed: what happens, in order, each with a number that chooses to whom."""
    stream = random.Random(seed)  # noqa: S311  a test's schedule
    names = stream.choices(list(WEIGHTS), list(WEIGHTS.values()), k=actions)
    return [(name, stream.randrange(1 << 16)) for name in names]


def run_schedule(schedule: Sequence[Action]) -> Simulation:
    """Carry out a schedule, then let the network heal; raise `Violation` if an invariant does not hold."""
    simulation = Simulation()
    simulation.begin()
    for action in schedule:
        simulation.perform(action)
    simulation.require_progress()
    return simulation


def shortened(schedule: Sequence[Action], tries: int = 300) -> list[Action]:
    """A shorter schedule that still violates an invariant: parts are left out for as long as it does."""
    found, size = list(schedule), max(1, len(schedule) // 2)
    while size and tries > 0:
        start = 0
        while start < len(found) and tries > 0:
            tries -= 1
            candidate = [*found[:start], *found[start + size :]]
            if _fails(candidate):
                found = candidate
            else:
                start += size
        size //= 2
    return found


def _fails(schedule: Sequence[Action]) -> bool:
    try:
        run_schedule(schedule)
    except Violation:
        return True
    return False


def check_seed(seed: int) -> None:
    """Run the schedule of a seed; a `Violation` names the shortened schedule and how to run it alone."""
    schedule = schedule_of(seed)
    try:
        run_schedule(schedule)
    except Violation:
        short = shortened(schedule)
        try:
            run_schedule(short)
        except Violation as last:
            violation = last
        lines = "\n".join(f"  {name} {choice}" for name, choice in short)
        raise Violation(
            f"seed {seed}: {violation}\nThe shortened schedule has {len(short)} actions:\n{lines}\n"
            f"Run it alone: python -m tensorforge.testing.protocol_simulation {seed}"
        ) from None


@dataclass(eq=False)
class Link:
    """One connection. What was sent before it broke may still arrive."""

    id: int
    worker: SimulatedWorker
    to_coordinator: deque[Any] = field(default_factory=deque)
    to_worker: deque[Any] = field(default_factory=deque)
    is_broken: bool = False
    is_closing: bool = False


class _Stream:
    """Stands for the connection object of a worker."""

    def __init__(self, owner: SimulatedWorker) -> None:
        self._owner = owner
        self.timeouts: Timeouts = Timeouts.derive(CONFIG)
        self.is_retired = False

    def send(self, message: Any) -> bool:
        link = self._owner.link
        if link is not None and not link.is_broken:
            link.to_coordinator.append(message)
        return link is not None

    def wake(self) -> None:
        """Do nothing: heartbeats are actions of the schedule."""

    def retire(self) -> None:
        self.is_retired = True

    def restart_stream(self) -> None:
        self._owner.drop_link()

    def close(self) -> None:
        self.is_retired = True


@dataclass(eq=False)
class Group:
    """The members of one generation that try to form a group and to commit steps in it."""

    generation: int
    verdict: messages.Verdict
    members: tuple[str, ...]
    connected: dict[str, SimulatedWorker] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    contributed: dict[int, set[str]] = field(default_factory=dict)
    votes: dict[int, dict[str, bool]] = field(default_factory=dict)
    is_broken: bool = False

    def has_all(self, found: Any) -> bool:
        """Whether every member is in `found`."""
        return len(found) == len(self.members)


class SimulatedWorker:
    """A worker process: the real worker object, and a model of its training code."""

    def __init__(self, simulation: Simulation, name: str, number: int) -> None:
        self._simulation = simulation
        self.name, self.number = name, number
        self.is_alive = True
        self.link: Link | None = None
        attributes = {"pid": str(number), "process": ""}
        self.worker = ElasticWorker(WorkerId(name, "host", 1), attributes=attributes)
        self.stream = _Stream(self)
        self.worker._connection = self.stream  # type: ignore[assignment]  # noqa: SLF001
        self.worker.fenced.append(lambda _reason: self.break_group())
        self.worker.rescaling_requested.append(self._announced)
        self.committed = -1
        self.updates = 0
        self.prepared: tuple[int, int] | None = None
        self.group: Group | None = None
        self.stage = ""
        self.answered = 0
        self.announced = 0

    def _announced(self, event: RescalingEvent) -> None:
        self._simulation.announced(self, event)
        if event.urgent:
            self.break_group()

    # The connection

    def connect(self) -> None:
        """Open a connection and say hello, unless there is one."""
        if self.is_alive and self.link is None and not self.stream.is_retired:
            self.link = self._simulation.open_link(self)
            self.link.to_coordinator.append(self.worker._hello())  # noqa: SLF001

    def drop_link(self) -> None:
        """The connection is broken; the coordinator has not noticed it yet."""
        if self.link is not None:
            self.link.is_broken = True
            self.link = None

    def receive(self, message: messages.FromCoordinator) -> None:
        """Take in one message of the coordinator."""
        try:
            self.worker._inbox.receive(message)  # noqa: SLF001
        except (ValueError, KeyError, IndexError) as error:
            raise Violation(f"{self.name} cannot handle {message}: {error!r}") from error

    # Training

    def break_group(self) -> None:
        """Abort the group that this worker is in."""
        if self.group is not None:
            self.group.is_broken = True
            self.group = None

    def die(self) -> None:
        """The process ends; peers and the coordinator notice later."""
        self.is_alive = False
        self.break_group()
        self.drop_link()

    def advance(self, choice: int) -> None:
        """Do the next thing that the training code would do."""
        state = self.worker._state  # noqa: SLF001
        if not self.is_alive:
            return
        if state.ended is not None or state.released is not None or state.problem is not None:
            self.die()
        elif self.group is not None:
            self._advance_in_group(self.group, choice)
        elif (event := self.worker.pending_event) is not None:
            self._answer(event)
        elif state.formation is not None and state.formation.generation == self.answered:
            self._join(state.formation)

    def _answer(self, event: RescalingEvent) -> None:
        generation = event.new_topology.epoch
        if self.worker.worker_id not in event.new_topology:
            self.worker.wait_for_release(0)
            return
        self.answered = generation
        prepared = None if self.prepared is None else self.prepared[0]
        self.worker.ready(generation, committed_step=self.committed, prepared_step=prepared)

    def _join(self, formation: messages.Formation) -> None:
        self.answered = 0
        self.group = self._simulation.group_of(formation)
        self.group.connected[self.name] = self
        self.stage = "connect"

    def _advance_in_group(self, group: Group, choice: int) -> None:
        # What all members have sent may arrive although the group broke meanwhile.
        may_fail = group.is_broken and choice % 2 == 0
        if self.stage == "connect":
            self._advance_if(
                group, not may_fail and group.has_all(group.connected), self._come_to_one_state
            )
        elif self.stage == "heal":
            self._advance_if(group, not may_fail and bool(group.holders), self._heal)
        elif self.stage == "step":
            self._advance_step(group, may_fail=may_fail)

    def _advance_if(self, group: Group, can: bool, proceed: Callable[[Group], None]) -> None:
        if can:
            proceed(group)
        elif group.is_broken:
            self.worker.suspect(group.generation, None, "a peer broke off")
            self.break_group()

    def _come_to_one_state(self, group: Group) -> None:
        rank, verdict = group.members.index(self.name), group.verdict
        if verdict.rolls_forward(rank):
            self._simulation.require(
                self.prepared is not None and self.prepared[0] == verdict.target_step,
                f"{self.name} rolls step {verdict.target_step} forward but has {self.prepared}",
            )
            self.roll_forward()
        if rank in verdict.donor_ranks():
            self._simulation.require(
                self.committed == verdict.target_step,
                f"{self.name} is to donate step {verdict.target_step} but has {self.committed}",
            )
            group.holders[rank] = self.updates
            self._formed(group)
        else:
            self.stage = "heal"

    def _heal(self, group: Group) -> None:
        self.committed = group.verdict.target_step
        self.updates = next(iter(group.holders.values()))
        self._formed(group)

    def _formed(self, group: Group) -> None:
        self.prepared = None
        self.stage = "step"
        self.worker.formed(group.generation)

    def _advance_step(self, group: Group, *, may_fail: bool) -> None:
        step = self.committed + 1
        contributed = group.contributed.setdefault(step, set())
        votes = group.votes.setdefault(step, {})
        if self.name not in contributed and not group.is_broken:
            contributed.add(self.name)
        elif self.name not in contributed:
            self._advance_if(group, False, self._vote)
        elif self.prepared is None:
            self._advance_if(group, not may_fail and group.has_all(contributed), self._prepare)
        elif self.name not in votes and not group.is_broken:
            votes[self.name] = self.worker.pending_event is not None
            if group.has_all(votes):
                self._simulation.vote_completed(group.generation)
        else:
            self._advance_if(group, not may_fail and group.has_all(votes), self._vote)

    def _prepare(self, group: Group) -> None:
        self.prepared = (self.committed + 1, group.generation)

    def _vote(self, group: Group) -> None:
        """The vote is complete: commit, and leave the group if a member wants to."""
        drains = any(group.votes[self.committed + 1].values())
        self._apply(group)
        self.after_update()
        if drains:
            self.group = None

    def _apply(self, group: Group | None) -> None:
        assert self.prepared is not None  # noqa: S101  for the type checker
        (step, origin), self.prepared = self.prepared, None
        self.committed = step
        voters = frozenset() if group is None else frozenset(group.connected.values())
        self._simulation.committed(step, origin, voters)
        self.worker.report_progress(origin, 0, step, 0.1)

    def roll_forward(self) -> None:
        """Commit a step whose vote was not known here when its group broke, as `Run` does."""
        self._apply(None)
        self.after_update_of_rolled_step()

    def after_update_of_rolled_step(self) -> None:
        """What belongs to a step that is committed while the cluster re-forms."""
        self.after_update()

    def after_update(self) -> None:
        """What belongs to every committed step."""
        self.updates += 1


class Simulation:
    """One cluster. `begin` starts it; `perform` carries out one action and checks the invariants."""

    journals_first = True
    """Whether the coordinator writes its journal before it sends messages, as it must."""

    def __init__(self) -> None:
        self.now = 0.0
        self.journal: list[str] = []
        self.machine: Machine | None = None
        self.workers: dict[str, SimulatedWorker] = {}
        self.unseen_exits: list[SimulatedWorker] = []
        self.links: dict[int, Link] = {}
        self.groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self.topologies: dict[int, tuple[str, ...]] = {}
        self.applied: dict[int, int] = {}
        self.newest = -1
        self.voting_generation = 0
        self.durable_generation = 0
        self.newest_voters: frozenset[SimulatedWorker] = frozenset()
        self.is_over = False
        self.violation: Violation | None = None
        self._numbers = itertools.count(1)
        self._crashes_next = False

    def require(self, holds: bool, text: str) -> None:
        """Raise a `Violation` unless the invariant holds.

        It is raised again after the action, because a worker catches what its callbacks raise.
        """
        if not holds:
            self.violation = self.violation or Violation(text)
            raise self.violation

    def begin(self) -> None:
        """Start the coordinator and the workers, and let them train together."""
        self.start_coordinator(0)
        for _ in range(WORKERS - 1):
            self.start_worker(len(self.workers))
        for _ in range(6):
            self._calm_round()

    def perform(self, action: Action) -> None:
        """Carry out one action of a schedule, if it is possible now, and check the invariants."""
        name, choice = action
        if not self.is_over:
            getattr(self, name)(choice)
            self._check()

    def _check(self) -> None:
        if self.violation is not None:
            raise self.violation
        for worker in self.workers.values():
            if worker.is_alive:
                self.require(
                    worker.updates == worker.committed + 1,
                    f"{worker.name} has committed {worker.committed + 1} steps, but "
                    f"after_update was called {worker.updates} times",
                )

    # What workers report

    def announced(self, worker: SimulatedWorker, event: RescalingEvent) -> None:
        """A generation was announced: the numbers grow, and one number has one list of members."""
        generation = event.new_topology.epoch
        members = tuple(w.id for w in event.new_topology.workers)
        known = self.topologies.setdefault(generation, members)
        self.require(known == members, f"generation {generation} is both {known} and {members}")
        self.require(
            generation <= self.durable_generation,
            f"generation {generation} was announced but is not in the journal",
        )
        self.require(
            generation > worker.announced,
            f"{worker.name} was told of generation {generation} after {worker.announced}",
        )
        worker.announced = generation

    def group_of(self, formation: messages.Formation) -> Group:
        """The group of a formation. No step that a member of it knows to be committed may be lost."""
        members = tuple(formation.members)
        key = (formation.generation, members)
        if key not in self.groups:
            verdict = formation.verdict
            knowing = {w.name for w in self.newest_voters if w.is_alive} & set(members)
            knowing = {n for n in knowing if self.workers.get(n) in self.newest_voters}
            self.require(
                verdict.target_step >= self.newest or not knowing,
                f"step {self.newest} is lost: generation {formation.generation} begins with step "
                f"{verdict.target_step} although {sorted(knowing)} voted for the newer one",
            )
            self._forget_lost_steps(members)
            self.groups[key] = Group(formation.generation, verdict, members)
        return self.groups[key]

    def _forget_lost_steps(self, members: tuple[str, ...]) -> None:
        """All processes that had the newest step are gone, or it is known that they have stopped.

        Then the run goes on from an older state, and the steps after it are computed again.
        """
        there = [self.workers[name] for name in members if name in self.workers]
        newest = (self.newest, self.applied.get(self.newest))
        if not any(w.committed >= self.newest or w.prepared == newest for w in there):
            self.newest = max((w.committed for w in there), default=-1)
            self.applied = {s: g for s, g in self.applied.items() if s <= self.newest}

    def vote_completed(self, generation: int) -> None:
        """All members of a generation have voted for a step: no later generation may have done so."""
        self.require(
            generation >= self.voting_generation,
            f"generations {generation} and {self.voting_generation} train at the same time",
        )
        self.voting_generation = generation

    def committed(self, step: int, origin: int, voters: frozenset[SimulatedWorker]) -> None:
        """A worker has committed a step; every other one that commits it must have it from the same group."""
        known = self.applied.setdefault(step, origin)
        self.require(
            known == origin,
            f"step {step} was committed by generation {known} and again by generation {origin}",
        )
        if step > self.newest:
            self.newest, self.newest_voters = step, voters

    # What may happen to workers

    def _pick(self, choice: int) -> SimulatedWorker | None:
        living = [worker for worker in self.workers.values() if worker.is_alive]
        return living[choice % len(living)] if living else None

    def advance(self, choice: int) -> None:
        """A worker's training code goes on."""
        worker = self._pick(choice)
        if worker is not None:
            worker.advance(choice // 64)
            if not worker.is_alive:
                self.unseen_exits.append(worker)

    def beat(self, choice: int) -> None:
        """A worker sends its heartbeat, with its newest progress."""
        worker = self._pick(choice)
        if worker is not None:
            for message in worker.worker._beat():  # noqa: SLF001
                worker.stream.send(message)

    def connect(self, choice: int) -> None:
        """A worker without a connection opens one."""
        worker = self._pick(choice)
        if worker is not None:
            worker.connect()

    def start_worker(self, choice: int) -> None:
        """A process is started; the process that had its name before is dead."""
        name = f"w{choice % WORKERS}"
        known = self.workers.get(name)
        if known is None or not known.is_alive:
            self.workers[name] = SimulatedWorker(self, name, next(self._numbers))
            self.workers[name].connect()

    def crash(self, choice: int) -> None:
        """A worker's process is killed."""
        worker = self._pick(choice)
        if worker is not None:
            worker.die()
            self.unseen_exits.append(worker)

    def leave(self, choice: int) -> None:
        """A worker asks to leave."""
        worker = self._pick(choice)
        if worker is not None and not worker.worker.is_leaving:
            worker.worker.leave("asked")

    def see_exit(self, choice: int) -> None:
        """The launcher reports the exit of a process."""
        if self.unseen_exits and self.machine is not None:
            worker = self.unseen_exits.pop(choice % len(self.unseen_exits))
            self.feed(commands.ReportExit(worker.name, "exit code 1", worker.number))

    # What may happen to the network

    def open_link(self, worker: SimulatedWorker) -> Link:
        """A new connection; the old one of the same worker may still deliver messages."""
        link = Link(next(self._numbers), worker)
        self.links[link.id] = link
        return link

    def cut(self, choice: int) -> None:
        """The connection of a worker breaks; neither end knows it yet, and what was sent may arrive."""
        worker = self._pick(choice)
        if worker is not None:
            worker.drop_link()

    def notice_break(self, choice: int) -> None:
        """The coordinator notices a broken connection."""
        broken = [link for link in self.links.values() if link.is_broken]
        if broken:
            link = broken[choice % len(broken)]
            del self.links[link.id]
            self.feed(inputs.Closed(link.id, "its stream broke", self.now))

    def deliver_to_coordinator(self, choice: int) -> None:
        """The oldest message of one connection arrives at the coordinator."""
        full = [link for link in self.links.values() if link.to_coordinator]
        if full and self.machine is not None:
            link = full[choice % len(full)]
            self.feed(inputs.Received(link.id, link.to_coordinator.popleft()))

    def deliver_to_worker(self, choice: int) -> None:
        """The oldest message of one connection arrives at its worker."""
        full = [w for w in self.workers.values() if w.link is not None and w.link.to_worker]
        if full:
            self._deliver(full[choice % len(full)])

    def _deliver(self, worker: SimulatedWorker) -> None:
        link = worker.link
        if link is None or not link.to_worker:
            return
        message = link.to_worker.popleft()
        if message is None:
            worker.drop_link()
        elif worker.is_alive:
            worker.receive(message)

    # What may happen to the coordinator

    def pass_time(self, choice: int) -> None:
        """The coordinator's clock goes on; connections that work are signs of life."""
        self.now += (0.05, 0.2, 0.4, 1.0)[choice % 4]
        alive = tuple(link.id for link in self.links.values() if not link.is_broken)
        self.feed(inputs.Alive(alive))
        self.feed(inputs.Tick())

    def crash_coordinator(self, _choice: int) -> None:
        """The coordinator's process is killed; all connections break."""
        self.machine = None
        self.links.clear()
        for worker in self.workers.values():
            worker.drop_link()

    def crash_between_journal_and_sending(self, _choice: int) -> None:
        """The coordinator will be killed when it has done one of both, and not yet the other."""
        self._crashes_next = True

    def start_coordinator(self, _choice: int) -> None:
        """The coordinator is started on its journal."""
        if self.machine is None:
            restored = replay(self._entries())
            self.machine = Machine(ClusterState(CONFIG, now=self.now, restored=restored))

    def feed(self, event: inputs.Input) -> None:
        """Give an input to the machine; write its entries, then send its messages."""
        if self.machine is None:
            return
        instructions = self.machine.handle(event, self.now)
        entries = [i.entry for i in instructions if isinstance(i, Record)]
        crashes = self._crashes_next and bool(entries)
        if self.journals_first:
            self._write(entries)
        if not (crashes and self.journals_first):
            self._send(instructions)
        if crashes:
            self._crashes_next = False
            # What is on its way to the workers arrives.
            for worker in list(self.workers.values()):
                while worker.link is not None and worker.link.to_worker:
                    self._deliver(worker)
            self.crash_coordinator(0)
            return
        if not self.journals_first:
            self._write(entries)
        self.is_over = self.machine.state.ended is not None

    def _write(self, entries: list[Any]) -> None:
        self.journal += map(entry_to_json, entries)
        decided = [entry.generation for entry in entries if isinstance(entry, Decided)]
        for generation in decided:
            self.require(
                generation > self.durable_generation,
                f"generation {generation} was decided after {self.durable_generation}",
            )
            self.durable_generation = generation

    def _send(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                for connection in instruction.connections:
                    if connection in self.links:
                        self.links[connection].to_worker.append(instruction.message)
            elif isinstance(instruction, Close) and instruction.connection in self.links:
                link = self.links.pop(instruction.connection)
                link.to_worker.append(None)

    def _entries(self) -> list[Any]:
        return [entry_from_json(line) for line in self.journal]

    # The end

    def require_progress(self) -> None:
        """With a healthy network, a step is committed soon, or the run ends with a reason."""
        if self.is_over:
            return
        self._crashes_next = False
        self.start_coordinator(0)
        if self._pick(0) is None:
            self.start_worker(0)
        goal = self.newest + 1
        for _ in range(MOST_ROUNDS):
            self._calm_round()
            self._check()
            if self.newest >= goal or self.is_over:
                return
            if self._pick(0) is None:
                self.start_worker(0)
        phase = None if self.machine is None else self.machine.state.phase.value
        raise Violation(f"no step is committed although everybody can talk; phase {phase}")

    def _calm_round(self) -> None:
        """Everything arrives, everybody goes on, and some time passes."""
        while self.unseen_exits:
            self.see_exit(0)
        for _ in range(3):
            for worker in list(self.workers.values()):
                worker.connect()
                worker.advance(1)
                if not worker.is_alive and worker.link is not None:
                    worker.drop_link()
            while any(link.is_broken for link in self.links.values()):
                self.notice_break(0)
            while any(link.to_coordinator for link in self.links.values()):
                self.deliver_to_coordinator(0)
            for worker in list(self.workers.values()):
                while worker.link is not None and worker.link.to_worker:
                    self._deliver(worker)
        self.pass_time(1)


def _main() -> None:
    import sys

    for seed in map(int, sys.argv[1:]):
        check_seed(seed)
        sys.stdout.write(f"seed {seed}: all invariants hold\n")


if __name__ == "__main__":
    _main()
