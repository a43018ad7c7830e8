"""Whoever is let go is not replaced, in whatever order the launcher hears of exits, reasons and numbers.

A model of the coordinator is asked to scale and to remove workers. What it shows travels to the launcher
with any delay, some of it never; the launcher's own wishes travel back with any delay; exits are seen at once.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tensorforge import environment
from tensorforge.elastic.protocol.cluster_view import ClusterView, WorkerView
from tensorforge.elastic.protocol.messages import State
from tensorforge.elastic.protocol.reasons import Departure, DepartureKind, Requester
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.launch.observations import Observer, TargetRequest
from tensorforge.launch.supervisor.events import (
    CoordinatorExited,
    CoordinatorStarted,
    Tick,
    WorkerExited,
)
from tensorforge.launch.supervisor.exit_reasons import EXPLANATION_TIMEOUT
from tensorforge.launch.supervisor.instructions import (
    Retire,
    SetTarget,
    StartCoordinator,
    StartWorker,
)
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.supervisor import Supervisor

SOAK = environment.SOAK.read()
START = datetime(2026, 1, 1, tzinfo=UTC)
MOST = 6


class Leader:
    """The coordinator, as far as a launcher can see it."""

    def __init__(self, desired):
        self.desired, self.version, self.by = desired, 0, Requester.OPERATOR
        self.workers: dict[str, Departure | None] = {}  # the reason why it leaves, if it does
        self.history: list[RescaleRecord] = []
        self.moments = 0

    def staying(self):
        return [name for name, reason in self.workers.items() if reason is None]

    def scale(self, workers, by):
        self.desired, self.version, self.by = workers, self.version + 1, by
        for name in self.staying()[workers:]:
            self.dismiss(name, DepartureKind.SURPLUS)

    def dismiss(self, name, kind):
        self.workers[name] = self.record(name, kind)

    def drop(self, name, kind=None):
        del self.workers[name]
        if kind is not None:
            self.record(name, kind)

    def record(self, name, kind):
        departure = Departure(kind=kind, worker=name, target_version=self.version)
        self.history.append(
            RescaleRecord(
                generation=len(self.history) + 1,
                type="scale_down",
                reason=str(departure),
                urgent=True,
                paused=False,
                added=(),
                removed={name: departure},
                old_size=0,
                new_size=0,
                detection_ms=0.0,
            )
        )
        return departure

    def view(self):
        self.moments += 1
        return ClusterView(
            run_id="default",
            phase="active",
            generation=len(self.history),
            formed_generation=len(self.history),
            workers=[self.show(rank, name) for rank, name in enumerate(self.workers)],
            waiting=[],
            desired_workers=self.desired,
            target_version=self.version,
            target_requester=self.by,
            min_workers=1,
            max_workers=MOST,
            state=State(step=-1, learning_rate=0.1),
            losses=0,
            consecutive_failures=0,
            stale_messages=0,
            refusals=0,
            rescales=list(self.history),
            taken_at=START + timedelta(milliseconds=self.moments),
        )

    def show(self, rank, name):
        return WorkerView(
            id=name,
            address="127.0.0.1:1",
            rank=rank,
            status="active",
            is_connected=True,
            incarnation="1",
            joined_at=START,
            last_seen_ms=1.0,
            leave_reason=self.workers[name],
        )


class Asked(RuleBasedStateMachine):
    @initialize(workers=st.integers(1, 4))
    def begin(self, workers):
        policy = SupervisionPolicy(
            workers=workers,
            max_workers=MOST,
            max_restarts=1000,
            hang_timeout=None,
            join_timeout=None,
            stop_timeout=1e9,
        )
        self.now = 0.0
        self.supervisor, self.observer = Supervisor(policy), Observer()
        self.leader = Leader(workers)
        self.running: set[str] = set()
        self.wishes: list[TargetRequest] = []
        self.wire: list[tuple[ClusterView, bool]] = []
        self.unseen = 0  # before this view arrives there is news of what was asked
        self.arrived = 0
        self.away = self.has_died = False
        self.expected = workers
        self.started, self.paid_for = 0, workers
        self.supervisor.begin()
        self.tell(CoordinatorStarted("a", 1))
        self.settle()

    def tell(self, event):
        for order in self.supervisor.handle(event, self.now):
            if isinstance(order, StartWorker):
                self.started += 1
                self.running.add(order.worker)
                self.leader.workers[order.worker] = None
            elif isinstance(order, SetTarget):
                self.observer.asked(order.workers)
                self.make_wish()
            elif isinstance(order, Retire):
                self.leader.dismiss(order.worker, DepartureKind.LEFT)
            elif isinstance(order, StartCoordinator):
                self.away = False
                self.tell(CoordinatorStarted("a", 2))

    def make_wish(self):
        wish = self.observer.next_request()
        if wish is not None:
            self.wishes.append(wish)

    def pick(self, names, share):
        return names[int(share * len(names))]

    shares = st.floats(0, 1, exclude_max=True)
    is_there = precondition(lambda self: not self.away)
    someone_stays = precondition(lambda self: not self.away and bool(self.leader.staying()))

    @is_there
    @rule(workers=st.integers(1, MOST))
    def an_operator_scales(self, workers):
        self.paid_for += max(0, workers - self.expected)
        self.expected = workers
        self.leader.scale(workers, Requester.OPERATOR)
        self.unseen = self.leader.moments + 1

    @someone_stays
    @rule(share=shares, by_itself=st.booleans())
    def a_worker_is_to_leave(self, share, by_itself):
        name = self.pick(self.leader.staying(), share)
        self.leader.dismiss(name, DepartureKind.LEFT if by_itself else DepartureKind.REMOVED)
        self.unseen = self.leader.moments + 1
        self.paid_for += self.expected == 1  # at the minimum it is replaced
        self.expected = max(1, self.expected - 1)

    @precondition(lambda self: any(self.leader.workers.values()))
    @rule(share=shares)
    def a_leaver_ends(self, share):
        leavers = [name for name, reason in self.leader.workers.items() if reason is not None]
        name = self.pick(leavers, share)
        self.leader.drop(name)
        self.running.discard(name)
        self.tell(WorkerExited(name, 0))

    @someone_stays
    @rule(share=shares)
    def a_worker_dies(self, share):
        name = self.pick(self.leader.staying(), share)
        self.paid_for += 1
        self.leader.drop(name, DepartureKind.FAILED)
        self.running.discard(name)
        self.tell(WorkerExited(name, -9))

    @is_there
    @rule()
    def the_cluster_is_shown(self):
        self.wire.append((self.leader.view(), False))

    @precondition(lambda self: bool(self.wire))
    @rule(share=shares)
    def news_arrives(self, share):
        """Answers may overtake views and the other way round; each of the two keeps its order."""
        kind = self.pick(sorted({answers for _, answers in self.wire}), share)
        at = next(i for i, (_, answers) in enumerate(self.wire) if answers is kind)
        view, answers = self.wire.pop(at)
        for event in self.observer.look(view, answers=answers):
            self.tell(event)
        self.make_wish()
        moment = (view.taken_at - START) // timedelta(milliseconds=1)
        self.arrived = max(self.arrived, moment)

    @precondition(lambda self: not self.away and bool(self.wishes))
    @rule()
    def a_wish_is_heard(self):
        wish = self.wishes.pop(0)
        if wish.expected in (None, self.leader.version):
            self.leader.scale(wish.workers, Requester.LAUNCHER)
        self.wire.append((self.leader.view(), True))

    @precondition(lambda self: not self.has_died)
    @rule()
    def the_coordinator_dies_and_comes_back(self):
        self.away = self.has_died = True
        self.tell(CoordinatorExited(-9))

    @rule(seconds=st.floats(0, 1))
    def time_passes(self, seconds):
        self.now += seconds
        self.tell(Tick())

    def settle(self):
        """Everything arrives, and everybody who was asked to go has gone."""
        while self.away:
            self.time_passes(20.0)
        self.the_cluster_is_shown()
        while True:
            while any(self.leader.workers.values()):
                self.a_leaver_ends(0.0)
            if self.wishes:
                self.a_wish_is_heard()
            elif self.arrived < self.leader.moments or self.arrived < self.unseen:
                self.the_cluster_is_shown()
                while self.wire:
                    self.news_arrives(0.0)
            elif self.supervisor.deadline() is not None:
                self.now = max(self.now, self.supervisor.deadline())
                self.tell(Tick())
                if self.supervisor.deadline() is not None:
                    assert self.supervisor.deadline() > self.now
            else:
                break

    def teardown(self):
        if not hasattr(self, "supervisor"):
            return
        self.settle()
        self.now += 2 * EXPLANATION_TIMEOUT
        self.tell(Tick())
        self.settle()
        assert self.supervisor.target == self.expected, "a number that nobody asked for"
        assert self.leader.desired == self.expected
        assert len(self.running) == self.expected
        assert self.started <= self.paid_for, "somebody was replaced once too often"


Asked.TestCase.settings = settings(max_examples=2000 if SOAK else 150, stateful_step_count=30)
TestAsked = Asked.TestCase
