"""A group that cannot be seen may still train: nobody takes its place until it is known to be over."""

import pytest

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.elastic.coordinator.machine.cluster_state import Phase
from tensorforge.elastic.protocol import commands, messages
from tensorforge.testing.simulated_cluster import SimulatedCluster

RESCALE = 30.0


def running(*names, **options):
    config = ElasticTrainingConfig(
        stability_window_ms=5_000,
        worker_heartbeat_timeout_ms=9_000,
        rescale_timeout_ms=30_000,
        failure_tolerance_percentage=100,
        **options,
    )
    cluster = SimulatedCluster(config)
    for name in names:
        cluster.join(name)
    cluster.pass_time(5)
    cluster.settle(step=0)
    assert cluster.machine.state.phase is Phase.ACTIVE
    return cluster


def cut_off(cluster, *names):
    unseen = [cluster.puppets[name] for name in names]
    for puppet in unseen:
        cluster.disconnect(puppet)
    return unseen


def members(cluster):
    return [worker.id for worker in cluster.machine.state.roster.members]


def phase(cluster):
    return cluster.machine.state.phase


def test_newcomers_do_not_take_the_place_of_a_group_that_is_only_cut_off():
    cluster = running("a", "b")
    new = cluster.join("new")
    cut_off(cluster, "a", "b")
    assert phase(cluster) is Phase.PAUSED
    newer = cluster.join("newer")
    cluster.answer_all()
    cluster.pass_time(RESCALE - 1)
    assert phase(cluster) is Phase.PAUSED
    assert not new.last(messages.FormationNotice)
    assert not newer.last(messages.Rescale)
    reason = cluster.machine.state.rescale_log.history[-1].reason
    assert "generation 1 may still be training" in reason


def test_a_cut_off_group_that_comes_back_goes_on_with_the_newcomers():
    cluster = running("a", "b")
    cluster.join("new")
    a, _b = cut_off(cluster, "a", "b")
    cluster.reconnect(a)
    assert a.last(messages.Refused).code == messages.REFUSED_FENCED
    back = cluster.join("a", previous=a)
    assert phase(cluster) is Phase.RESCALING
    cluster.answer(back, committed_step=500)
    cluster.answer(cluster.puppets["new"])
    assert members(cluster) == ["new", "a"]
    assert back.last(messages.FormationNotice).target_step == 500


def test_one_member_that_is_known_to_be_dead_ends_the_whole_group():
    cluster = running("a", "b", "c")
    cluster.join("new")
    _a, b, _c = cut_off(cluster, "a", "b", "c")
    cluster.feed(commands.ReportExit("b", "exit code 137", b.pid))
    assert members(cluster) == ["new"]
    cluster.settle(step=1)
    assert phase(cluster) is Phase.ACTIVE


def test_the_exit_of_another_process_of_that_name_proves_nothing():
    cluster = running("a", "b")
    cluster.join("new")
    cut_off(cluster, "a", "b")
    cluster.feed(commands.ReportExit("b", "exit code 137", 4242))
    cluster.feed(commands.ReportExit("stranger", "exit code 137", None))
    assert phase(cluster) is Phase.PAUSED


def test_a_process_started_again_under_its_name_on_its_host_proves_its_predecessor_gone():
    cluster = running("a", "b")
    cut_off(cluster, "a", "b")
    cluster.join("b")
    assert members(cluster) == ["b"]


def test_a_name_taken_on_another_host_proves_nothing():
    cluster = running("a", "b")
    cut_off(cluster, "a", "b")
    cluster.join("b", host="elsewhere")
    assert phase(cluster) is Phase.PAUSED


def test_a_member_whose_code_raised_trains_no_more():
    cluster = running("a", "b")
    cluster.join("new")
    cluster.say(cluster.puppets["a"], messages.Abort, reason="KeyError")
    cut_off(cluster, "b")
    assert members(cluster) == ["new"]


def test_a_member_that_stood_at_the_barrier_has_ended_the_old_group():
    cluster = running("a", "b")
    cut_off(cluster, "b")
    cluster.join("new")
    cluster.pass_time(0)
    cluster.answer(cluster.puppets["a"])
    cluster.settle(step=1)
    cluster.pass_time(5)
    cluster.answer(cluster.puppets["a"])
    cut_off(cluster, "a")
    assert members(cluster) == ["new"], "a had stopped, and b can do nothing without it"


def test_a_group_that_was_told_to_form_counts_before_everybody_confirmed_it():
    cluster = running("a", "b", "c")
    (c,) = cut_off(cluster, "c")
    cluster.answer_all()
    assert phase(cluster) is Phase.FORMING
    cluster.join("new")
    a, _b = cut_off(cluster, "a", "b")
    cluster.feed(commands.ReportExit("c", "exit code 137", c.pid))
    assert phase(cluster) is Phase.PAUSED, "c was needed by generation 1, not by 2"
    cluster.feed(commands.ReportExit("a", "exit code 137", a.pid))
    assert members(cluster) == ["new"]
    assert phase(cluster) is Phase.RESCALING


@pytest.mark.parametrize("is_known_dead", [False, True])
def test_a_restarted_coordinator_is_as_careful(is_known_dead):
    cluster = running("a", "b")
    a = cluster.puppets["a"]
    cluster.restart()
    cluster.puppets.clear()
    cluster.join("new")
    cluster.pass_time(15)
    assert phase(cluster) is Phase.PAUSED
    if is_known_dead:
        cluster.feed(commands.ReportExit("a", "exit code 137", a.pid))
    assert phase(cluster) is (Phase.RESCALING if is_known_dead else Phase.PAUSED)


def test_a_group_that_never_comes_back_ends_the_run_with_advice():
    cluster = running("a", "b")
    new = cluster.join("new")
    cut_off(cluster, "a", "b")
    cluster.pass_time(RESCALE)
    ended = new.last(messages.Ended)
    assert ended.outcome == "aborted"
    assert "no member of generation 1 came back within 30000 ms" in ended.reason
    assert "--again" in ended.reason


def test_the_last_member_that_leaves_says_when_it_has_stopped_and_a_standby_goes_on():
    cluster = running("a", max_workers=1)
    cluster.join("standby")
    leaver = cluster.puppets["a"]
    cluster.say(leaver, messages.Leave, reason="preempted")
    assert members(cluster) == ["a", "standby"], "the standby gets its state"
    assert leaver.last(messages.Released) is None
    cluster.settle()
    assert members(cluster) == ["standby"]
    cluster.settle(step=9)
    assert phase(cluster) is Phase.ACTIVE
    assert leaver.last(messages.Released)


def test_the_last_member_that_leaves_is_released_when_nobody_takes_over():
    cluster = running("a")
    leaver = cluster.puppets["a"]
    cluster.say(leaver, messages.Leave)
    cluster.answer(leaver)
    assert leaver.last(messages.Released)
    assert phase(cluster) is Phase.PAUSED
