"""Random events, delays, duplicates and reorderings against the coordinator's machine.

The model is small: what must hold whatever happens. The network between workers and coordinator is a bag of
messages in flight per worker, delivered late, twice, or never.
"""

import contextlib
import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.elastic.coordinator import journal_records
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.cluster_state import Phase
from tensorforge.elastic.coordinator.machine.instructions import Record, Send
from tensorforge.elastic.protocol import commands, messages
from tensorforge.errors import ConfigurationError
from tensorforge.testing.simulated_cluster import SimulatedCluster

NAMES = [f"w{index}" for index in range(8)]
PICK = st.integers(min_value=0, max_value=10_000)


class CoordinatorModel(RuleBasedStateMachine):
    """Drives a simulated cluster and remembers what was promised."""

    @initialize(
        least=st.integers(1, 3),
        spare=st.none() | st.integers(0, 3),
        desired=st.booleans(),
        tolerance=st.sampled_from([0, 20, 50, 100, 100]),
        consecutive=st.integers(0, 50),
        workers=st.integers(0, 4),
    )
    def begin(self, least, spare, desired, tolerance, consecutive, workers):
        config = ElasticTrainingConfig(
            min_workers=least,
            max_workers=None if spare is None else least + spare,
            stability_window_ms=2_000,
            rescale_timeout_ms=10_000,
            worker_heartbeat_timeout_ms=3_000,
            failure_tolerance_percentage=tolerance,
            max_consecutive_failures=consecutive,
        )
        self.cluster = SimulatedCluster(config, desired_workers=least if desired else None)
        self.topologies = {0: ()}
        self.formations = {}
        self.answers = {}
        self.zombies = []
        self.away = []
        self.dead = []
        self.hosts = 0
        self.seats = {}
        self.trained = []
        self.stopped = {}
        self.late = []
        self.feed = self.cluster.feed
        self.cluster.feed = self.checked_feed
        for name in NAMES[:workers]:
            self.cluster.join(name)
        self.train()

    # Every event passes here

    def checked_feed(self, event):
        if isinstance(event, inputs.Received) and isinstance(event.message, messages.Ready):
            self.stop_before(event.message.incarnation, event.message.generation)
        before = self.cluster.machine.state.generation
        old_members = self.cluster.machine.state.roster.members
        instructions = self.feed(event)
        self.check_journal_first(instructions)
        for instruction in instructions:
            if isinstance(instruction, Record) and isinstance(
                instruction.entry, journal_records.Decided
            ):
                before = self.check_decision(instruction.entry, before, old_members)
                old_members = tuple(seat.worker for seat in instruction.entry.seats)
            if isinstance(instruction, Send):
                self.check_message(instruction)
        return instructions

    def check_journal_first(self, instructions):
        durable = max(self.topologies)
        for instruction in instructions:
            if isinstance(instruction, Record) and isinstance(
                instruction.entry, journal_records.Decided
            ):
                durable = instruction.entry.generation
            if isinstance(instruction, Send) and isinstance(instruction.message, messages.Rescale):
                assert instruction.message.generation <= durable, "journaled before announced"

    def check_decision(self, entry, before, old_members):
        assert entry.generation > before, "the generation strictly grows"
        assert entry.generation not in self.topologies, "one topology per generation"
        members = tuple(seat.worker for seat in entry.seats)
        names = [worker.id for worker in members]
        assert len(set(names)) == len(names)
        stayed = [worker for worker in old_members if worker in members]
        fresh = set(entry.added)
        assert [w for w in members if w in stayed and w.id not in fresh] == [
            w for w in stayed if w.id not in fresh
        ], "survivors keep their order"
        if len(members) == len(old_members):
            for rank, worker in enumerate(old_members):
                if worker in members and worker.id not in fresh:
                    assert members[rank] == worker, "replacements leave the others' ranks alone"
        limit = self.cluster.machine.state.limit
        roster = self.cluster.machine.state.roster
        stay = [m for m in members if not (p := roster.get(m.id)) or not p.is_leaving]
        assert limit is None or len(stay) <= limit or not fresh
        too_few = len(members) < self.cluster.config.min_workers
        assert entry.paused == (too_few or "may still be training" in entry.reason)
        assert entry.reason
        self.topologies[entry.generation] = members
        self.seats[entry.generation] = entry.seats
        return entry.generation

    def check_message(self, instruction):
        message = instruction.message
        if isinstance(message, messages.FormationNotice):
            members = self.topologies[message.generation]
            config = self.cluster.config
            assert config.min_workers <= len(members)
            # Leaving members may hand their state over to joiners, in one generation together.
            roster = self.cluster.machine.state.roster
            stay = [m for m in members if not (p := roster.get(m.id)) or not p.is_leaving]
            assert config.max_workers is None or len(stay) <= config.max_workers
            known = self.formations.setdefault(message.generation, message.reports)
            assert known == message.reports, "all members hear the same"
            assert len(message.reports) == len(members)
            self.check_that_nobody_else_trains(message.generation)
            assert message.target_step == max(r.committed_step for r in message.reports)

    def check_that_nobody_else_trains(self, generation):
        """A step needs all members of its generation, so one that has stopped ends the group for good."""
        for earlier in self.trained:
            assert earlier >= generation or any(
                self.stopped.get(seat.incarnation, 0) > earlier for seat in self.seats[earlier]
            ), f"generations {earlier} and {generation} could both commit steps"
        if generation not in self.trained:
            self.trained.append(generation)

    def stop_before(self, incarnation, generation):
        self.stopped[incarnation] = max(generation, self.stopped.get(incarnation, 0))

    def die(self, puppet):
        self.stop_before(puppet.incarnation, math.inf)
        self.dead.append(puppet)

    # What may happen

    def pick(self, choice):
        puppets = [p for p in self.cluster.puppets.values() if p.is_connected]
        return puppets[choice % len(puppets)] if puppets else None

    @rule(choice=PICK)
    def join(self, choice):
        name = NAMES[choice % len(NAMES)]
        known = self.cluster.puppets.get(name)
        if known is None or not known.is_connected:
            self.start(name)

    def start(self, name):
        """A new process: on a host of its own while somebody of that name lives unseen."""
        known = self.cluster.puppets.pop(name, None)
        if known is not None:
            self.die(known)
        if any(puppet.id == name for puppet in (*self.away, *self.zombies)):
            self.hosts += 1
            self.cluster.join(name, host=f"host{self.hosts}")
        else:
            self.cluster.join(name)

    @rule(choice=PICK)
    def crash(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.die(puppet)
            self.cluster.disconnect(puppet)

    @precondition(lambda self: self.dead)
    @rule(choice=PICK, has_pid=st.booleans())
    def exit_is_seen(self, choice, has_pid):
        puppet = self.dead[choice % len(self.dead)]
        lives = any(p.id == puppet.id for p in (*self.away, *self.zombies))
        if has_pid or (puppet.id not in self.cluster.puppets and not lives):
            pid = puppet.pid if has_pid else None
            self.cluster.feed(commands.ReportExit(puppet.id, "exit code 1", pid))

    @rule(choice=PICK)
    def cut_off(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.away.append(puppet)
            self.cluster.disconnect(puppet)

    @rule()
    def cut_off_everybody(self):
        for puppet in [p for p in self.cluster.puppets.values() if p.is_connected]:
            self.away.append(puppet)
            self.cluster.disconnect(puppet)

    @precondition(lambda self: self.away)
    @rule(choice=PICK)
    def heal(self, choice):
        puppet = self.away.pop(choice % len(self.away))
        self.cluster.reconnect(puppet)
        answer = puppet.received[-1]
        if isinstance(answer, messages.Ended):
            self.die(puppet)
        elif isinstance(answer, messages.Refused) and answer.code == messages.REFUSED_FENCED:
            self.stop_before(puppet.incarnation, math.inf)
            self.cluster.join(puppet.id, previous=puppet)
        elif isinstance(answer, messages.Refused):
            self.away.append(puppet)  # another one has its name, so it trains on

    @rule(choice=PICK)
    def freeze(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.zombies.append(self.cluster.puppets.pop(puppet.id))

    @precondition(lambda self: self.zombies)
    @rule(choice=PICK)
    def wake(self, choice):
        zombie = self.zombies.pop(choice % len(self.zombies))
        generation = self.cluster.machine.state.generation
        present = self.cluster.machine.state.roster.by_connection(zombie.connection) is not None
        self.cluster.say(zombie, messages.Ready, committed_step=99)
        self.cluster.say(zombie, messages.Suspect, reason="x")
        if not present:
            assert self.cluster.machine.state.generation == generation, "a zombie decides nothing"
        self.die(zombie)
        self.cluster.disconnect(zombie)

    @rule(choice=PICK)
    def reconnect(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.cluster.reconnect(puppet)

    @rule(choice=PICK, step=st.integers(-1, 5))
    def answer(self, choice, step):
        puppet = self.pick(choice)
        if puppet is not None:
            # A worker gives one answer per generation, and says the same again when it reconnects.
            key = (puppet.incarnation, puppet.generation)
            self.cluster.answer(puppet, committed_step=self.answers.setdefault(key, step))

    @rule(choice=PICK)
    def form(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.cluster.say(puppet, messages.Formed)

    @rule(choice=PICK, step=st.integers(0, 5))
    def commit(self, choice, step):
        puppet = self.pick(choice)
        if puppet is not None:
            self.cluster.commit(puppet, step)

    @rule(choice=PICK)
    def hold_back(self, choice):
        puppet = self.pick(choice)
        if puppet is not None and puppet.generation is not None:
            key = (puppet.incarnation, puppet.generation)
            for kind, extra in (
                (messages.Ready, {"committed_step": self.answers.setdefault(key, 1)}),
                (messages.Formed, {}),
                (messages.Suspect, {"reason": "late"}),
                (messages.Leave, {}),
            ):
                fields = {"incarnation": puppet.incarnation, "generation": puppet.generation}
                self.late.append((puppet.connection, kind(**fields, **extra)))

    @precondition(lambda self: self.late)
    @rule(choice=PICK, twice=st.booleans())
    def deliver_late(self, choice, twice):
        connection, message = self.late.pop(choice % len(self.late))
        for _ in range(1 + twice):
            generation = self.cluster.machine.state.generation
            is_old = message.generation < generation and not isinstance(message, messages.Leave)
            self.cluster.feed(inputs.Received(connection, message))
            assert not is_old or self.cluster.machine.state.generation == generation

    @rule(choice=PICK)
    def suspect(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.cluster.say(puppet, messages.Suspect, reason="collective failed")

    @rule(choice=PICK)
    def leave(self, choice):
        puppet = self.pick(choice)
        if puppet is not None:
            self.cluster.say(puppet, messages.Leave, reason="asked")

    @rule(workers=st.integers(1, 6))
    def scale(self, workers):
        with contextlib.suppress(ConfigurationError):
            self.cluster.feed(commands.Scale(workers, "test"))

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 2.5, 4.0]))
    def pass_time(self, seconds):
        self.cluster.pass_time(seconds)

    @rule()
    def train(self):
        self.cluster.pass_time(2.5)
        self.settle()

    @rule()
    def settle(self):
        for puppet in self.cluster.members():
            puppet.step = self.answers.setdefault((puppet.incarnation, puppet.generation), 5)
        self.cluster.settle(step=5)

    @rule()
    def restart(self):
        machine = self.cluster.machine
        before = (
            machine.state.generation,
            machine.state.roster.members,
            machine.state.desired_workers,
        )
        self.cluster.restart()
        machine = self.cluster.machine
        if self.cluster.machine.state.ended is None:
            assert (machine.state.generation, machine.state.roster.members) == before[:2]
            assert machine.state.desired_workers == before[2]
        for puppet in list(self.cluster.puppets.values()):
            self.cluster.reconnect(puppet)

    # What must hold

    @invariant()
    def everybody_who_trains_knows_the_same_members(self):
        cluster = getattr(self, "cluster", None)
        if cluster is None:
            return
        for puppet in cluster.puppets.values():
            if puppet.generation is not None and puppet.is_connected:
                assert puppet.members == self.topologies[puppet.generation]

    def teardown(self):
        cluster = getattr(self, "cluster", None)
        if cluster is not None:
            self.check_that_it_still_lives(cluster)

    def check_that_it_still_lives(self, cluster):
        """No sequence of events deadlocks: with willing workers, training goes on or the run has ended."""
        for name in NAMES:
            if name not in cluster.puppets or not cluster.puppets[name].is_connected:
                self.start(name)
        for _ in range(12):
            self.settle()
            if cluster.machine.state.phase in (Phase.ENDED, Phase.ACTIVE):
                break
            cluster.pass_time(cluster.machine.state.timeouts.barrier)
        assert cluster.machine.state.phase in (Phase.ENDED, Phase.ACTIVE)
        assert cluster.machine.state.ended is None or cluster.machine.state.ended.reason


class TestCoordinatorModel(CoordinatorModel.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40)
