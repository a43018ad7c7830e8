from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.elastic.protocol.cluster_view import ClusterView, WorkerView
from tensorforge.elastic.protocol.messages import Ended, State
from tensorforge.elastic.protocol.reasons import Departure, DepartureKind, Requester, RunOutcome
from tensorforge.elastic.protocol.rescale_record import RescaleRecord
from tensorforge.launch.observations import Observer, TargetRequest, changes
from tensorforge.launch.supervisor.events import (
    GenerationFormed,
    TargetChanged,
    TrainingAborted,
    TrainingFinished,
    WorkerJoined,
    WorkerLost,
    WorkerReleased,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def departed(kind, name, version=0, **facts):
    return Departure(kind=kind, worker=name, target_version=version, **facts)


def failed(name):
    return departed(DepartureKind.FAILED, name, detail="its stream broke")


def left(name, version=0):
    return departed(DepartureKind.LEFT, name, version, detail="SIGTERM")


def removed_by_x(name, version=0):
    return departed(DepartureKind.REMOVED, name, version, by="x")


def surplus(name):
    return departed(DepartureKind.SURPLUS, name, by="x", workers=1)


def worker(name, rank=-1, *, incarnation="1", leaving=None, loss=None):
    return WorkerView(
        id=name,
        address="127.0.0.1:1",
        rank=rank,
        status="active",
        is_connected=True,
        incarnation=incarnation,
        joined_at=NOW,
        last_seen_ms=1.0,
        leave_reason=leaving,
        metrics={} if loss is None else {"loss": loss},
    )


def rescale(generation, *departures, first_commit=None, reason="because"):
    return RescaleRecord(
        generation=generation,
        type="scale_down",
        reason=reason,
        urgent=True,
        paused=False,
        added=(),
        removed={departure.worker: departure for departure in departures},
        old_size=2,
        new_size=1,
        detection_ms=1.0,
        decision_ms=2.0,
        barrier_ms=3.0,
        forming_ms=4.0,
        first_commit_ms=first_commit,
    )


def view(*workers, waiting=(), step=-1, formed=0, rescales=(), ended=None, **target):
    target = {"desired": 2, "version": 1, "by": Requester.LAUNCHER, **target}
    return ClusterView(
        run_id="default",
        phase="active",
        generation=formed,
        formed_generation=formed,
        workers=list(workers),
        waiting=list(waiting),
        desired_workers=target["desired"],
        target_version=target["version"],
        target_requester=target["by"],
        min_workers=1,
        max_workers=None,
        state=State(step=step, learning_rate=0.1),
        losses=0,
        consecutive_failures=0,
        stale_messages=0,
        refusals=0,
        rescales=list(rescales),
        ended=ended,
    )


def between(old, new):
    return list(changes(old, new))


def test_newcomers_are_told_as_members_and_as_waiting():
    first = view(worker("a", 0), waiting=[worker("b")])
    assert between(None, first) == [WorkerJoined("a"), WorkerJoined("b")]
    assert between(first, first) == []


def test_a_process_that_took_a_name_over_is_a_newcomer():
    old, new = view(worker("a", 0)), view(worker("a", 0, incarnation="2"))
    assert WorkerJoined("a") in between(old, new)
    assert WorkerLost("a", "it is gone") in between(old, new)


def test_a_failure_is_told_with_its_reason():
    old = view(worker("a", 0), worker("b", 1))
    gone = rescale(2, failed("b"))
    assert between(old, view(worker("a", 0), rescales=[gone])) == [
        WorkerLost("b", "its stream broke")
    ]


def test_a_leave_is_told_once_when_it_begins():
    old = view(worker("a", 0), worker("b", 1))
    leaving = view(worker("a", 0), worker("b", 1, leaving=removed_by_x("b")))
    assert between(old, leaving) == [WorkerReleased("b", "b retires: x asked for it")]
    assert between(leaving, view(worker("a", 0))) == []


def test_a_leave_that_was_over_between_two_looks_is_told_too():
    old = view(worker("a", 0), worker("b", 1))
    gone = rescale(2, left("b"))
    found = between(old, view(worker("a", 0), rescales=[gone]))
    assert found == [WorkerReleased("b", "b leaves: SIGTERM")]


def test_what_a_worker_says_when_it_leaves_decides_nothing():
    old = view(worker("a", 0), worker("b", 1))
    for text in ("b failed: x", "x wants 1 worker", "the launcher wants 1 worker"):
        gone = rescale(2, departed(DepartureKind.LEFT, "b", detail=text))
        (event,) = between(old, view(worker("a", 0), rescales=[gone]))
        assert event == WorkerReleased("b", f"b leaves: {text}", surplus=False)


def test_a_departure_without_a_kind_is_a_loss():
    old = view(worker("a", 0), worker("b", 1))
    gone = rescale(2, departed(DepartureKind.UNKNOWN, "b", detail="b leaves: it asked to"))
    found = between(old, view(worker("a", 0), rescales=[gone]))
    assert found == [WorkerLost("b", "b leaves: it asked to")]


def asking(workers):
    """An observer whose first wish was heard."""
    observer = Observer()
    observer.asked(workers)
    observer.next_request()
    list(observer.look(view(worker("a", 0), worker("b", 1), desired=workers), answers=True))
    return observer


def test_a_new_target_comes_before_the_departures_it_causes():
    new = view(worker("a", 0), worker("b", 1, leaving=surplus("b")), desired=1)
    released = WorkerReleased("b", "b retires: x wants 1 worker", surplus=True)
    assert list(asking(2).look(new)) == [TargetChanged(1), released]


def test_those_who_go_because_fewer_are_wanted_come_first():
    old = view(worker("a", 0), worker("b", 1))
    workers = worker("a", 0, leaving=removed_by_x("a")), worker("b", 1, leaving=surplus("b"))
    assert between(old, view(*workers, desired=1)) == [
        WorkerReleased("b", "b retires: x wants 1 worker", surplus=True),
        WorkerReleased("a", "a retires: x asked for it"),
    ]


def test_the_launchers_own_wishes_are_no_news_and_hide_older_numbers():
    observer = asking(3)
    observer.asked(2)
    observer.next_request()
    observer.asked(1)
    members = worker("a", 0), worker("b", 1)
    assert list(observer.look(view(*members, desired=3))) == []
    assert list(observer.look(view(*members, desired=2, version=2), answers=True)) == []
    assert observer.next_request() == TargetRequest(1, expected=2)
    assert list(observer.look(view(*members, desired=1, version=3), answers=True)) == []
    assert list(observer.look(view(*members, desired=4, version=4, by=Requester.OPERATOR))) == [
        TargetChanged(4)
    ]


def test_a_wish_that_was_refused_leaves_what_the_coordinator_shows():
    observer = asking(3)
    observer.asked(9)
    observer.next_request()
    assert list(observer.look(None, answers=True)) == [TargetChanged(3)]


def test_the_first_wish_holds_in_any_case():
    observer = Observer()
    assert observer.next_request() is None
    observer.asked(2)
    assert observer.next_request() == TargetRequest(2, expected=None)


def test_a_wish_waits_for_the_answer_of_the_one_before_and_names_its_version():
    observer, members = asking(2), (worker("a", 0), worker("b", 1))
    observer.asked(3)
    assert observer.next_request() == TargetRequest(3, expected=1)
    for workers in (4, 5):
        observer.asked(workers)
        assert observer.next_request() is None
    answer = view(*members, desired=3, version=2)
    list(observer.look(answer))
    assert observer.next_request() is None
    list(observer.look(answer, answers=True))
    assert observer.next_request() == TargetRequest(5, expected=2)


def test_an_operators_wish_that_crosses_the_launchers_wins():
    observer = asking(4)
    observer.asked(3)
    observer.next_request()
    crossing = view(worker("a", 0), worker("b", 1), desired=6, version=2, by=Requester.OPERATOR)
    assert list(observer.look(crossing)) == [TargetChanged(6)]
    assert observer.next_request() is None
    assert list(observer.look(crossing, answers=True)) == []


@pytest.mark.parametrize("version", [2, 3])
def test_an_operators_wish_wins_over_all_that_the_launcher_was_about_to_ask_for(version):
    """Version 2: instead of the wish that is under way; version 3: after that was followed."""
    observer = asking(4)
    observer.asked(3)
    observer.next_request()
    observer.asked(2)
    crossing = view(
        worker("a", 0), worker("b", 1), desired=8, version=version, by=Requester.OPERATOR
    )
    assert list(observer.look(crossing, answers=True)) == [TargetChanged(8)]
    assert observer.next_request() is None


def test_an_operators_number_is_known_even_if_it_is_the_one_that_the_launcher_wished_for():
    observer = asking(4)
    observer.asked(3)
    observer.next_request()
    observer.asked(2)
    crossing = view(worker("a", 0), worker("b", 1), desired=3, version=2, by=Requester.OPERATOR)
    assert list(observer.look(crossing, answers=True)) == [TargetChanged(3)]
    assert observer.next_request() is None


def test_whoever_left_before_somebody_asked_for_a_number_is_known_to_it():
    records = [rescale(2, removed_by_x("a", version=1)), rescale(3, left("b", version=2))]
    new = view(worker("c", 0), rescales=records, desired=2, version=2, by=Requester.OPERATOR)
    observer = Observer()
    list(observer.look(view(worker("a", 0), worker("b", 1), worker("c", 2))))
    assert list(observer.look(new)) == [
        WorkerReleased("a", "a retires: x asked for it", surplus=True),
        WorkerReleased("b", "b leaves: SIGTERM"),
    ]


def test_a_wish_of_the_launchers_knows_nothing_of_those_who_left_before_it_was_heard():
    observer = asking(2)
    observer.asked(3)
    observer.next_request()
    gone = rescale(2, left("b", version=1))
    answer = view(worker("a", 0), rescales=[gone], desired=3, version=2)
    assert list(observer.look(answer, answers=True)) == [WorkerReleased("b", "b leaves: SIGTERM")]


def test_a_leave_after_a_number_that_crossed_a_wish_counts_on_top_of_that_number():
    observer = asking(4)
    observer.asked(3)
    observer.next_request()
    gone = rescale(2, left("b", version=2))
    crossing = view(worker("a", 0), rescales=[gone], desired=6, version=2, by=Requester.OPERATOR)
    events = list(observer.look(crossing))
    assert events == [TargetChanged(6), WorkerReleased("b", "b leaves: SIGTERM")]
    observer.asked(5)
    assert list(observer.look(crossing, answers=True)) == []
    assert observer.next_request() == TargetRequest(5, expected=2)


def test_a_view_that_was_overtaken_is_passed_over():
    observer, later = asking(2), NOW + timedelta(seconds=1)
    newer = msgspec.structs.replace(view(worker("a", 0), desired=1), taken_at=later)
    older = msgspec.structs.replace(view(worker("a", 0), worker("b", 1)), taken_at=NOW)
    assert TargetChanged(1) in list(observer.look(newer))
    assert list(observer.look(older)) == []
    set_back = msgspec.structs.replace(older, taken_at=NOW - timedelta(hours=1))
    assert TargetChanged(2) in list(observer.look(set_back))


def test_a_worker_that_came_and_went_between_two_views_is_told():
    old = view(worker("a", 0), formed=1)
    gone = rescale(3, left("b"), failed("c"))
    new = view(worker("a", 0), formed=3, rescales=[gone])
    assert WorkerReleased("b", "b leaves: SIGTERM") in between(old, new)
    assert not any(isinstance(event, WorkerLost) for event in between(old, new))


def test_a_formation_is_told_and_told_again_when_its_first_step_is_timed():
    old = view(worker("a", 0))
    formed = view(worker("a", 0), formed=3, rescales=[rescale(3)])
    (event,) = between(old, formed)
    assert event == GenerationFormed(
        3, ("a",), "because", {"detection": 1.0, "decision": 2.0, "barrier": 3.0, "forming": 4.0}, 1
    )
    timed = view(worker("a", 0), formed=3, rescales=[rescale(3, first_commit=5.0)])
    (event,) = between(formed, timed)
    assert event.phases["first commit"] == 5.0
    assert between(timed, timed) == []


def test_what_the_journal_tells_of_an_earlier_launch_is_no_news():
    ghost = worker("far-1", 0)
    ghost.is_connected = False
    assert between(None, view(ghost, formed=3, step=9, rescales=[rescale(3)])) == []


def test_progress_is_told_with_the_loss():
    old, new = view(worker("a", 0), step=3), view(worker("a", 0, loss=0.5), step=7)
    assert between(old, new) == [
        CommittedStep(step=7, epoch=0, metrics={"loss": 0.5}, learning_rate=0.1)
    ]
    assert between(new, old) == []


def test_the_end_is_told_once_and_nobody_is_lost_by_it():
    old = view(worker("a", 0))
    done = view(ended=Ended(outcome=RunOutcome.COMPLETED, reason="all epochs"))
    assert between(old, done) == [TrainingFinished("all epochs")]
    assert between(done, done) == []
    failed = view(ended=Ended(outcome=RunOutcome.ABORTED, reason="too few"))
    assert between(old, failed) == [TrainingAborted("the run was aborted: too few")]
