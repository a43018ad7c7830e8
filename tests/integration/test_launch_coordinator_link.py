"""The launcher and an operator set the target at a real coordinator."""

from __future__ import annotations

import queue

from tensorforge.elastic import CoordinatorClient, ElasticCoordinator, ElasticTrainingConfig
from tensorforge.launch.coordinator_link import CoordinatorLink
from tensorforge.launch.observations import Observer
from tensorforge.launch.supervisor.events import TargetChanged


def test_an_operators_number_survives_all_that_the_launcher_was_about_to_ask_for():
    arrived = queue.SimpleQueue()
    with (
        ElasticCoordinator(ElasticTrainingConfig(), desired_workers=4) as coordinator,
        CoordinatorClient(coordinator.address) as operator,
    ):
        observer = Observer()
        link = CoordinatorLink(coordinator.address, None, lambda: arrived.put(None))

        def answered():
            events = []
            while True:
                arrived.get(timeout=20)
                for update in link.take_updates():
                    events += observer.look(update.view, answers=update.answers)
                    if update.answers:
                        return events

        def make_wish():
            wish = observer.next_request()
            link.set_target(wish.workers, wish.expected)

        try:
            observer.asked(4)
            make_wish()
            answered()
            observer.asked(3)
            operator.scale(8, "an operator")
            make_wish()
            observer.asked(2)
            assert TargetChanged(8) in answered()
            assert observer.next_request() is None
            assert operator.status().desired_workers == 8
        finally:
            link.close()
