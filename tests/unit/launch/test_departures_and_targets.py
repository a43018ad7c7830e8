"""Operators make workers leave and ask for numbers between two looks of the launcher: the real coordinator's
machine, and what the launcher makes of its view."""

import pytest

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.elastic.coordinator.machine.state_view import cluster_view
from tensorforge.elastic.protocol import commands
from tensorforge.elastic.protocol.reasons import Requester
from tensorforge.launch.observations import Observer
from tensorforge.launch.supervisor.events import CoordinatorStarted
from tensorforge.launch.supervisor.instructions import SetTarget, StartWorker
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.launch.supervisor.supervisor import Supervisor
from tensorforge.testing.simulated_cluster import SimulatedCluster

STABILITY = 5.0
LEAVE = commands.Remove("worker-1", "x")
THEN_THREE = [LEAVE, commands.Scale(3, "x")]
THREE_THEN = [commands.Scale(3, "x"), LEAVE]


class Launched:
    """Three workers under a supervisor that sees a view only when `look` is called."""

    def __init__(self, *guests):
        config = ElasticTrainingConfig(stability_window_ms=5_000)
        self.cluster = SimulatedCluster(config, desired_workers=3)
        self.supervisor = Supervisor(SupervisionPolicy(workers=3))
        self.observer = Observer()
        self.tell(CoordinatorStarted("a", 1))
        self.say()
        for name in (*self.supervisor.workers, *guests):
            self.cluster.join(name)
        self.look()
        self.cluster.pass_time(STABILITY)
        self.cluster.settle(step=0)
        self.look()

    def tell(self, event):
        orders = self.supervisor.handle(event, self.cluster.clock())
        for order in orders:
            if isinstance(order, SetTarget):
                self.observer.asked(order.workers)
        return orders

    def say(self):
        """Wishes are heard at once, and what follows from them is shown."""
        while (wish := self.observer.next_request()) is not None:
            workers, expected = wish.workers, wish.expected
            self.cluster.feed(commands.Scale(workers, "it", expected, Requester.LAUNCHER))
            self.see(answers=True)

    def see(self, *, answers=False):
        shown = cluster_view(self.cluster.machine.state, self.cluster.clock(), "default")
        events = self.observer.look(shown, answers=answers)
        return [order for event in events for order in self.tell(event)]

    def look(self):
        orders = self.see()
        self.say()
        return [order for order in orders if isinstance(order, StartWorker)]

    @property
    def wanted(self):
        return self.cluster.machine.state.desired_workers


def nothing(_cluster):
    pass


def it_is_gone(cluster):
    cluster.puppets.pop("worker-1")
    cluster.settle(step=1)


def the_coordinator_is_restarted(cluster):
    cluster.restart()


MEANWHILE = [nothing, it_is_gone, the_coordinator_is_restarted]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize(("asked", "wanted", "started"), [(THEN_THREE, 3, 1), (THREE_THEN, 2, 0)])
def test_a_number_that_was_asked_for_after_a_leave_holds(asked, wanted, started, meanwhile):
    launched = Launched()
    for event in asked:
        launched.cluster.feed(event)
    meanwhile(launched.cluster)
    assert len(launched.look()) == started
    assert (launched.wanted, launched.supervisor.target) == (wanted, wanted)


@pytest.mark.parametrize(("more", "wanted"), [(2, 2), (3, 3), (5, 5)])
def test_whatever_the_number_is(more, wanted):
    launched = Launched()
    launched.cluster.feed(LEAVE)
    launched.cluster.feed(commands.Scale(more, "x"))
    assert len(launched.look()) == wanted - 2
    assert (launched.wanted, launched.supervisor.target) == (wanted, wanted)


def test_of_two_who_leave_only_the_one_after_the_number_counts():
    launched = Launched()
    for event in (*THEN_THREE, commands.Remove("worker-2", "x")):
        launched.cluster.feed(event)
    assert len(launched.look()) == 1
    assert (launched.wanted, launched.supervisor.target) == (2, 2)


GUEST = commands.Remove("far-1", "x")


@pytest.mark.parametrize(
    ("asked", "wanted", "local"),
    [
        ([GUEST], 3, 3),
        ([GUEST, commands.Scale(4, "x")], 4, 4),
        ([commands.Scale(4, "x"), GUEST], 3, 3),
        ([commands.Scale(3, "x")], 3, 3),
    ],
)
def test_a_guest_that_leaves_or_retires_is_counted_once(asked, wanted, local):
    launched = Launched("far-1")
    assert (launched.wanted, launched.supervisor.target) == (4, 3)
    for event in asked:
        launched.cluster.feed(event)
    launched.look()
    assert (launched.wanted, launched.supervisor.target) == (wanted, local)
