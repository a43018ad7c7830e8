"""The supervisor under any order of events, beside a model of the processes it commands."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorforge import environment
from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.launch.supervisor.events import (
    CoordinatorExited,
    CoordinatorStarted,
    GenerationFormed,
    HostNotice,
    StacksDumped,
    StopRequested,
    TargetChanged,
    Tick,
    TrainingFinished,
    WorkerExited,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
    WorkerStarted,
    WorkerUnplaceable,
    WorkerVanished,
)
from tensorforge.launch.supervisor.exit_codes import UserFailure
from tensorforge.launch.supervisor.instructions import (
    DumpStacks,
    End,
    Kill,
    Retire,
    StartCoordinator,
    StartWorker,
    StopTraining,
)
from tensorforge.launch.supervisor.shutdown import Phase
from tensorforge.launch.supervisor.staffing import SHRINK_TIMEOUT
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.supervisor import Supervisor

SOAK = environment.SOAK.read()


class Launched(RuleBasedStateMachine):
    @initialize(
        workers=st.integers(1, 4),
        standbys=st.integers(0, 2),
        restarts=st.integers(0, 3),
        slack=st.integers(0, 3),
    )
    def begin(self, workers, standbys, restarts, slack):
        self.now = 0.0
        self.policy = SupervisionPolicy(
            workers=workers,
            min_workers=max(1, workers - 1),
            max_workers=workers + slack,
            standbys=standbys,
            max_restarts=restarts,
            max_host_failures=2,
            restart_window=1e9,
            hang_timeout=20.0,
            join_timeout=20.0,
        )
        self.supervisor = Supervisor(self.policy)
        self.running: set[str] = set()
        self.leaving: set[str] = set()
        self.names: set[str] = set()
        self.failures = self.host_failures = 0
        self.asked_for = workers + standbys
        self.ended = None
        self.shrunk_at = None
        self.coordinator = True
        self.step = 0
        assert self.supervisor.begin() == [StartCoordinator()]
        self.tell(CoordinatorStarted("a", 1))

    def tell(self, event):
        for order in self.supervisor.handle(event, self.now):
            self.obey(order)

    def obey(self, order):
        assert self.ended is None, f"{order} after the end"
        if isinstance(order, StartWorker):
            assert order.worker not in self.names, "a name was used twice"
            self.names.add(order.worker)
            self.running.add(order.worker)
        elif isinstance(order, Retire | StopTraining | Kill | DumpStacks):
            assert order.worker in self.running
            if isinstance(order, Retire):
                self.leaving.add(order.worker)
        elif isinstance(order, StartCoordinator):
            self.coordinator = True
        elif isinstance(order, End):
            self.ended = order.outcome
            assert not self.running

    def pick(self, share):
        names = sorted(self.running)
        return names[int(share * len(names))]

    has_workers = precondition(lambda self: bool(self.running))
    shares = st.floats(0, 1, exclude_max=True)

    @has_workers
    @rule(share=shares, code=st.sampled_from([-9, -11, 0, 1, 3]), raised=st.booleans())
    def a_worker_exits(self, share, code, raised):
        name = self.pick(share)
        told = UserFailure(kind="E", message="m", where=str(code), traceback="")
        if self.supervisor.phase is Phase.RUNNING and name not in self.leaving:
            self.failures += 1
        self.running.discard(name)
        self.tell(WorkerExited(name, code, told if raised and code > 0 else None))

    @has_workers
    @rule(share=shares, host=st.sampled_from(["a", "b"]))
    def a_worker_is_placed(self, share, host):
        self.tell(WorkerStarted(self.pick(share), 1, host))

    @has_workers
    @rule(share=shares, kind=st.sampled_from([WorkerVanished, WorkerUnplaceable]))
    def a_machine_fails(self, share, kind):
        name = self.pick(share)
        if self.supervisor.phase is Phase.RUNNING and name not in self.leaving:
            self.host_failures += 1
        self.running.discard(name)
        self.tell(kind(name, "reason"))

    @has_workers
    @rule(share=shares, seconds=st.floats(0, 60))
    def a_machine_is_taken_away(self, share, seconds):
        self.asked_for += 1  # the worker that leaves is replaced elsewhere
        self.tell(HostNotice(self.pick(share), seconds))

    @has_workers
    @rule(share=shares, kind=st.sampled_from([WorkerJoined, WorkerLost, WorkerReleased]))
    def the_coordinator_speaks_of_a_worker(self, share, kind):
        name = self.pick(share)
        self.tell(kind(name, "reason") if kind is not WorkerJoined else kind(name))
        if kind is WorkerReleased:
            self.leaving.add(name)
            self.asked_for += 1  # at the minimum, or for a standby, another one is started

    @rule()
    def a_step_is_committed(self):
        self.step += 1
        self.tell(CommittedStep(step=self.step))

    @rule()
    def a_generation_forms(self):
        self.tell(GenerationFormed(self.step, tuple(self.running)))

    @rule(workers=st.integers(0, 9))
    def someone_scales(self, workers):
        before = self.supervisor.target
        self.tell(TargetChanged(workers))
        if self.supervisor.target < before:
            self.shrunk_at = self.now
        if self.supervisor.target != before:  # a new wish also renews what was given up before
            self.asked_for += (
                max(0, self.supervisor.target - before) + self.failures + self.host_failures
            )

    @has_workers
    @rule(share=shares)
    def stacks_arrive(self, share):
        self.tell(StacksDumped(self.pick(share), "nothing readable"))

    @precondition(lambda self: self.coordinator)
    @rule(code=st.sampled_from([-9, 1]))
    def the_coordinator_dies(self, code):
        self.coordinator = False
        self.tell(CoordinatorExited(code))

    @precondition(lambda self: self.coordinator)
    @rule()
    def the_coordinator_answers(self):
        self.tell(CoordinatorStarted("a", 1))

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds):
        self.now += seconds
        self.tell(Tick())

    @rule()
    def the_next_deadline_comes(self):
        deadline = self.supervisor.deadline()
        if deadline is not None:
            self.now = max(self.now, deadline)
            self.tell(Tick())
            again = self.supervisor.deadline()
            assert again is None or again > self.now, "a deadline that passed is not acted upon"

    @precondition(lambda self: self.shrunk_at is not None)
    @rule()
    def surplus_workers_have_had_their_time(self):
        self.now = max(self.now, self.shrunk_at + SHRINK_TIMEOUT)
        self.tell(Tick())
        self.shrunk_at = None

    @rule(times=st.integers(1, 2))
    def someone_interrupts(self, times):
        for _ in range(times):
            self.tell(StopRequested(2))

    @rule()
    def training_finishes(self):
        self.tell(TrainingFinished())

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "supervisor") and self.ended is None:
            assert set(self.supervisor.workers) == set(self.running)

    @invariant()
    def nobody_is_started_beyond_what_is_wanted_and_paid_for(self):
        if not hasattr(self, "supervisor"):
            return
        staying = [name for name in self.running if name not in self.leaving]
        if self.supervisor.phase is Phase.RUNNING and self.shrunk_at is None:
            assert len(staying) <= self.supervisor.target + self.policy.standbys
        paid = min(self.failures, self.policy.max_restarts)
        paid += min(self.host_failures, self.policy.max_host_failures)
        assert len(self.names) <= self.asked_for + paid

    def teardown(self):
        if not hasattr(self, "supervisor"):
            return
        for _ in range(2):
            if self.ended is None:
                self.tell(StopRequested(2))
        for name in list(self.running):
            self.running.discard(name)
            self.tell(WorkerExited(name, -9))
        assert self.ended is not None, "everything is down, but the run does not end"
        assert self.ended.code in (0, 1, 130)


Launched.TestCase.settings = settings(max_examples=1000 if SOAK else 60, stateful_step_count=30)
TestLaunched = Launched.TestCase
