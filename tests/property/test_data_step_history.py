"""Exactly once, whatever happens: joins, leaves, crashes at any moment, restarts at another size.

A small model of training: every member holds its own copy of the ledger, a step is prepared by all
before anybody applies it, and a crash may come between any two of these. What survives
decides: a step that any survivor applied is applied by all (they hold it prepared), any other is
discarded. The samples that committed steps took are then counted one by one.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tensorforge.cluster.elastic_config import ElasticTrainingConfig, RedistributionType
from tensorforge.cluster.topology import ClusterTopology
from tensorforge.cluster.workers import WorkerId
from tensorforge.data import DataRedistributor, HistoryWriter, Ledger, prove_history

HISTORIES, PER_TEST = 1000, 100


@dataclass
class Member:
    ledger: Ledger
    prepared: tuple | None = None  # (step, ranges)

    def apply(self):
        step, taken = self.prepared
        self.ledger = self.ledger.commit(step, taken)
        self.prepared = None


@dataclass
class History:
    """One run from the first generation to the end of its last epoch."""

    seed: int
    path: object = None
    epochs: int = 2
    members: dict = field(default_factory=dict)
    ownership: dict = field(default_factory=dict)
    committed: dict = field(default_factory=dict)  # step → (epoch, ranges)
    checkpoints: list = field(default_factory=list)
    events: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.size = self.random.randint(1, 40)
        self.batch = self.random.randint(1, 5)
        self.whole_shards = self.random.random() < 0.5
        self.shards = self.random.randint(1, 8)
        strategy = self.random.choice(list(RedistributionType))
        self.planner = DataRedistributor(ElasticTrainingConfig(redistribution_type=strategy))
        self.topology = ClusterTopology()
        self.newest = 0
        self.file = HistoryWriter(self.path, self.size, self.shards) if self.path else None
        self.start(Ledger(self.size, self.shards))

    def start(self, ledger):
        """Begin, or begin again after everything died, with any number of workers."""
        self.members = {self.newcomer(): Member(ledger) for _ in range(self.random.randint(1, 5))}
        self.ownership = {}
        self.rescale()

    def newcomer(self):
        self.newest += 1
        return WorkerId(f"w{self.newest}", "127.0.0.1", 1)

    def rescale(self):
        """Agree on the step, heal newcomers, and plan who reads what."""
        target = max(m.ledger.committed_step for m in self.members.values() if m.ledger)
        donor = next(
            m for m in self.members.values() if m.ledger and m.ledger.committed_step == target
        )
        for member in self.members.values():
            if member.ledger is None:
                member.ledger = Ledger.unpack(donor.ledger.pack())
            if member.ledger.committed_step < target:
                assert member.prepared[0] == target
                member.apply()
            member.prepared = None
        following = self.topology.succeed(self.members)
        ledger = donor.ledger
        assert all(member.ledger == ledger for member in self.members.values())
        if self.whole_shards:
            plan = self.planner.calculate_shard_plan(
                self.topology,
                following,
                ledger.partition,
                ownership={
                    worker: [s.shard_id for s in owned] for worker, owned in self.ownership.items()
                },
            )
            self.ownership = dict(plan.worker_assignments)
        else:
            plan = self.planner.calculate_plan(
                self.topology,
                following,
                self.size,
                ownership=self.ownership,
                consumed=ledger.consumed,
            )
            self.ownership = plan.ownership
        assert self.planner.validate_redistribution(following, plan).problems == ()
        self.topology = following

    @property
    def ledger(self):
        return next(iter(self.members.values())).ledger

    def next_taken(self):
        """What each member would take: a batch of each of its shards, or of its own samples."""
        taken = []
        for owned in self.ownership.values():
            if self.whole_shards:
                batches = (self.ledger.batch(shard.shard_id, self.batch) for shard in owned)
                taken += [(b.start_index, b.end_index) for b in batches if b.size]
            else:
                taken += (owned - self.ledger.consumed).first(self.batch)
        return sorted(taken)

    def trouble(self, chance):
        """Whether something happens now; a history has so much trouble and then ends in peace."""
        return self.events.total() < 30 and self.random.random() < chance

    def crash_some(self):
        """Kill up to all members; true if somebody is left."""
        victims = self.random.sample(list(self.members), self.random.randint(1, len(self.members)))
        for victim in victims:
            del self.members[victim]
        self.events["crash"] += 1
        return bool(self.members)

    def restart(self):
        """Everybody is dead: begin again from some checkpoint, at another size."""
        packed = self.random.choice(self.checkpoints or [Ledger(self.size, self.shards).pack()])
        ledger = Ledger.unpack(packed)
        self.committed = {s: c for s, c in self.committed.items() if s <= ledger.committed_step}
        self.checkpoints = [
            p for p in self.checkpoints if Ledger.unpack(p).committed_step <= ledger.committed_step
        ]
        if self.file:
            self.file.resume(ledger.committed_step, self.topology.epoch + 1)
        self.events["restart"] += 1
        self.start(ledger)

    def after_crash(self):
        if self.crash_some():
            self.rescale()
        else:
            self.restart()

    def attempt(self):
        """One attempt at a step; a crash may come before the vote or between two who apply."""
        step, taken = self.ledger.committed_step + 1, self.next_taken()
        if self.trouble(0.08):
            return self.after_crash()
        for member in self.members.values():
            member.prepared = (step, taken)
        order = list(self.members.values())
        self.random.shuffle(order)
        crash_after = self.random.randrange(len(order) + 1) if self.trouble(0.15) else None
        for count, member in enumerate(order):
            if count == crash_after:
                return self.after_partial_commit(step, taken)
            member.apply()
        if crash_after == len(order):
            return self.after_partial_commit(step, taken)
        return self.record(step, taken)

    def after_partial_commit(self, step, taken):
        epoch = self.ledger.epoch
        if not self.crash_some():
            return self.restart()
        if any(member.ledger.committed_step == step for member in self.members.values()):
            self.record(step, taken, epoch)
            self.events["rolled forward"] += 1
        else:
            self.events["discarded"] += 1
        return self.rescale()

    def record(self, step, taken, epoch=None):
        epoch = self.ledger.epoch if epoch is None else epoch
        assert step not in self.committed
        self.committed[step] = (epoch, taken)
        if self.file:
            self.file.append(epoch, step, taken, self.topology.epoch)

    def change_members(self):
        if self.trouble(0.08):
            for _ in range(self.random.randint(1, 3)):
                self.members[self.newcomer()] = Member(None)
            self.events["join"] += 1
            self.rescale()
        elif len(self.members) > 1 and self.trouble(0.06):
            del self.members[self.random.choice(list(self.members))]
            self.events["leave"] += 1
            self.rescale()

    def run(self):
        while True:
            self.ledger.prove()
            if self.ledger.is_complete:
                if self.ledger.epoch == self.epochs - 1:
                    return self
                for member in self.members.values():
                    member.ledger = member.ledger.next_epoch()
                self.rescale()  # the new epoch's samples are dealt; nothing of it is held yet
            if self.random.random() < 0.2:
                self.checkpoints.append(self.ledger.pack())
            self.change_members()
            self.attempt()


@pytest.mark.parametrize("block", range(HISTORIES // PER_TEST))
def test_each_sample_is_in_exactly_one_committed_step_of_each_epoch(block, tmp_path):
    events = Counter()
    for seed in range(block * PER_TEST, (block + 1) * PER_TEST):
        path = tmp_path / f"{seed}.jsonl" if seed % 10 == 0 else None
        history = History(seed, path).run()
        assert sorted(history.committed) == list(range(len(history.committed)))
        for epoch in range(history.epochs):
            seen = Counter(
                position
                for number, ranges in history.committed.values()
                if number == epoch
                for start, stop in ranges
                for position in range(start, stop)
            )
            assert seen == Counter(range(history.size)), (seed, epoch)
        if path:
            history.file.close()
            proof = prove_history(path)
            assert proof.is_complete
            assert proof.ledger == history.ledger
        events += history.events
        events[f"whole shards: {history.whole_shards}"] += 1
    # The histories are no walks in the park: each kind of trouble happened many times.
    assert min(events[kind] for kind in ("join", "leave", "crash", "restart")) >= 20, events
    assert min(events[f"whole shards: {answer}"] for answer in (True, False)) >= 20
    assert min(events[kind] for kind in ("rolled forward", "discarded")) >= 10, events
