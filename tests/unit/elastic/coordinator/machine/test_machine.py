"""Every transition of the coordinator, with a clock that moves only when the test says so."""

import pytest

from tensorforge.cluster.goal import Goal
from tensorforge.elastic import AdaptationStrategy, ElasticTrainingConfig
from tensorforge.elastic.coordinator import journal_records
from tensorforge.elastic.coordinator.machine import inputs
from tensorforge.elastic.coordinator.machine.cluster_state import ClusterState, Phase
from tensorforge.elastic.coordinator.machine.instructions import Record, Send
from tensorforge.elastic.coordinator.machine.machine import Machine
from tensorforge.elastic.protocol import commands, messages
from tensorforge.elastic.protocol.reasons import DepartureKind
from tensorforge.elastic.protocol.timeouts import RECONNECT_MOST
from tensorforge.errors import ConfigurationError, ConflictError
from tensorforge.testing.simulated_cluster import SimulatedCluster

STABILITY, SILENCE, RESCALE = 5.0, 9.0, 30.0


def config(**options):
    defaults = {
        "stability_window_ms": 5_000,
        "worker_heartbeat_timeout_ms": 9_000,
        "rescale_timeout_ms": 30_000,
        "failure_tolerance_percentage": 50,
    }
    return ElasticTrainingConfig(**{**defaults, **options})


def running(workers=3, step=0, **options):
    """A cluster that trains: so many workers, one committed step."""
    desired = options.pop("desired_workers", None)
    cluster = SimulatedCluster(config(**options), desired_workers=desired)
    for index in range(workers):
        cluster.join(f"w{index}")
    cluster.pass_time(STABILITY)
    cluster.settle(step=step)
    assert cluster.machine.state.phase is Phase.ACTIVE
    return cluster


def names(cluster):
    return [worker.id for worker in cluster.machine.state.roster.members]


def phase(cluster):
    return cluster.machine.state.phase


def last_reason(cluster):
    return cluster.machine.state.rescale_log.history[-1].reason


# Starting


def test_the_first_generation_waits_for_quiet():
    cluster = SimulatedCluster(config())
    cluster.join("a")
    cluster.pass_time(STABILITY - 1)
    cluster.join("b")
    cluster.pass_time(STABILITY - 1)
    assert phase(cluster) is Phase.GATHERING
    cluster.pass_time(1)
    assert phase(cluster) is Phase.RESCALING
    assert names(cluster) == ["a", "b"]
    assert cluster.machine.state.generation == 1


def test_the_first_generation_forms_at_once_when_everybody_who_is_expected_is_here():
    cluster = SimulatedCluster(config(), desired_workers=2)
    cluster.join("a")
    assert phase(cluster) is Phase.GATHERING
    cluster.join("b")
    assert phase(cluster) is Phase.RESCALING


def test_nothing_starts_below_the_minimum():
    cluster = SimulatedCluster(config(min_workers=2))
    cluster.join("a")
    cluster.pass_time(1000)
    assert phase(cluster) is Phase.GATHERING
    assert cluster.machine.state.generation == 0


def test_training_starts_when_all_have_answered_and_formed():
    cluster = SimulatedCluster(config(), desired_workers=2)
    a, b = cluster.join("a"), cluster.join("b")
    cluster.answer(a)
    assert a.last(messages.FormationNotice) is None
    cluster.answer(b)
    assert a.last(messages.FormationNotice) == b.last(messages.FormationNotice)
    assert phase(cluster) is Phase.FORMING
    cluster.form_all()
    assert phase(cluster) is Phase.ACTIVE


# Losing


def test_a_broken_stream_is_a_failure_at_once():
    cluster = running(3)
    cluster.disconnect(cluster.puppets["w1"])
    assert cluster.machine.state.generation == 2
    assert names(cluster) == ["w0", "w2"]
    notice = cluster.puppets["w0"].last(messages.Rescale)
    assert notice.urgent
    assert "w1 failed: its stream broke" in notice.reason
    assert cluster.puppets["w0"].members == cluster.machine.state.roster.members


def test_silence_is_a_failure_after_the_heartbeat_timeout():
    cluster = running(3)
    silent = cluster.puppets.pop("w1")
    cluster.pass_time(SILENCE - 0.1)
    assert cluster.machine.state.generation == 1
    cluster.pass_time(0.2)
    assert names(cluster) == ["w0", "w2"]
    assert "no sign of life" in last_reason(cluster)
    assert silent.last(messages.Refused).code == messages.REFUSED_FENCED


def test_a_heartbeat_is_a_sign_of_life_and_is_answered():
    cluster = running(2)
    w0, w1 = cluster.puppets["w0"], cluster.puppets["w1"]
    for sequence in range(5):
        cluster.pass_time(SILENCE / 2, beating=False)
        cluster.say(w0, messages.Heartbeat, sequence=sequence)
        cluster.say(w1, messages.Heartbeat, sequence=sequence)
    assert cluster.machine.state.generation == 1
    assert w0.last(messages.Pong).sequence == 4


def test_an_exit_that_a_launcher_saw_is_a_failure_at_once():
    cluster = running(3)
    cluster.feed(commands.ReportExit("w1", "exit code 1"))
    assert names(cluster) == ["w0", "w2"]
    assert "exit code 1" in last_reason(cluster)


def test_an_exit_of_another_process_of_that_name_is_no_failure():
    cluster = running(2)
    cluster.machine.state.roster.get("w1").attributes["pid"] = "42"
    cluster.feed(commands.ReportExit("w1", "exit code 1", pid=41))
    assert cluster.machine.state.generation == 1


def test_survivors_keep_their_order_and_ranks_stay_dense():
    cluster = running(4)
    cluster.disconnect(cluster.puppets["w1"])
    cluster.settle(step=1)
    cluster.disconnect(cluster.puppets["w0"])
    assert names(cluster) == ["w2", "w3"]


def test_a_crash_during_the_barrier_supersedes_the_generation():
    cluster = running(4)
    cluster.disconnect(cluster.puppets["w3"])
    cluster.answer(cluster.puppets["w0"])
    cluster.disconnect(cluster.puppets["w2"])
    assert cluster.machine.state.generation == 3
    cluster.settle(step=1)
    assert phase(cluster) is Phase.ACTIVE
    assert names(cluster) == ["w0", "w1"]


def test_more_losses_than_tolerated_end_the_run_with_an_emergency_checkpoint():
    cluster = running(5, failure_tolerance_percentage=20)
    w0 = cluster.puppets["w0"]
    cluster.disconnect(cluster.puppets["w4"])
    cluster.disconnect(cluster.puppets["w3"])
    assert phase(cluster) is Phase.ENDED
    ended = w0.last(messages.Ended)
    assert ended.outcome == "aborted"
    assert ended.emergency
    assert "2 of 5 workers lost (40 %)" in ended.reason
    assert "failure_tolerance_percentage is 20" in ended.reason


def test_a_committed_step_forgives_earlier_losses():
    cluster = running(5, failure_tolerance_percentage=20)
    cluster.disconnect(cluster.puppets["w4"])
    cluster.settle(step=1)
    cluster.disconnect(cluster.puppets["w3"])
    assert phase(cluster) is Phase.RESCALING


def test_one_loss_is_always_tolerated_unless_the_percentage_is_zero():
    cluster = running(2, failure_tolerance_percentage=1)
    cluster.disconnect(cluster.puppets["w1"])
    assert phase(cluster) is Phase.RESCALING
    cluster = running(2, failure_tolerance_percentage=0)
    cluster.disconnect(cluster.puppets["w1"])
    assert phase(cluster) is Phase.ENDED


def test_rescales_without_a_committed_step_between_end_the_run():
    cluster = running(8, max_consecutive_failures=3)
    for index in range(2):
        cluster.disconnect(cluster.puppets[f"w{index}"])
        cluster.settle()
        assert phase(cluster) is Phase.ACTIVE
    cluster.disconnect(cluster.puppets["w2"])
    assert phase(cluster) is Phase.ENDED
    assert "max_consecutive_failures is 3" in cluster.machine.state.ended.reason


def test_failures_that_hit_the_same_barrier_are_one_failure_in_a_row():
    cluster = running(8, max_consecutive_failures=2)
    for index in range(3):
        cluster.disconnect(cluster.puppets[f"w{index}"])
    assert phase(cluster) is Phase.RESCALING
    assert cluster.machine.state.tolerance.consecutive_failures == 1


# Joining


def test_a_storm_of_joins_is_one_rescale_after_the_stability_window():
    cluster = running(2)
    for index in range(20):
        cluster.join(f"j{index:02}")
        cluster.pass_time(0.1)
    assert cluster.machine.state.generation == 1
    cluster.pass_time(STABILITY)
    assert cluster.machine.state.generation == 2
    assert len(names(cluster)) == 22
    notice = cluster.puppets["w0"].last(messages.Rescale)
    assert not notice.urgent
    assert cluster.puppets["w0"].members == cluster.machine.state.roster.members


def test_an_endless_trickle_of_joins_does_not_wait_for_ever():
    cluster = running(1)
    waited = 0.0
    for index in range(1000):
        cluster.join(f"j{index}")
        cluster.pass_time(STABILITY - 1)
        waited += STABILITY - 1
        if cluster.machine.state.generation > 1:
            break
    assert waited <= STABILITY + RESCALE + STABILITY


def test_a_joiner_beyond_the_maximum_is_a_standby_that_replaces_the_next_failure():
    cluster = running(3, max_workers=3)
    cluster.join("spare")
    assert list(cluster.machine.state.roster.waiting) == ["spare"]
    assert cluster.notes[-1].text == "spare@host:1 joined as a standby"
    cluster.pass_time(100)
    assert cluster.machine.state.generation == 1
    cluster.disconnect(cluster.puppets["w1"])
    assert names(cluster) == ["w0", "spare", "w2"]
    assert cluster.machine.state.rescale_log.history[-1].type == "replace"


def test_waiting_joiners_come_along_with_a_failures_rescale():
    cluster = running(3)
    cluster.join("new")
    cluster.disconnect(cluster.puppets["w2"])
    assert names(cluster) == ["w0", "w1", "new"]


def test_a_joiner_that_goes_before_it_was_taken_in_costs_nothing():
    cluster = running(2)
    cluster.disconnect(cluster.join("shy"))
    cluster.pass_time(100)
    assert cluster.machine.state.generation == 1


def test_the_formation_says_who_is_new_and_where_training_stands():
    cluster = running(2)
    for puppet in cluster.members():
        cluster.commit(puppet, 7)
    cluster.join("new")
    cluster.pass_time(STABILITY)
    cluster.answer(cluster.puppets["w0"], committed_step=7, attributes={"store": "x:1"})
    cluster.answer(cluster.puppets["w1"], committed_step=6, prepared_step=7)
    cluster.answer(cluster.puppets["new"], committed_step=-1)
    formation = cluster.puppets["new"].last(messages.FormationNotice)
    assert formation.target_step == 7
    assert [report.is_newcomer for report in formation.reports] == [False, False, True]
    assert formation.reports[0].attributes == {"store": "x:1"}
    assert formation.reports[1].prepared_step == 7
    assert cluster.machine.state.progress.step == 7


# Leaving, scaling, finishing


def test_a_graceful_leave_is_no_failure_and_the_leaver_is_released_at_the_barrier():
    cluster = running(3, failure_tolerance_percentage=0)
    leaver = cluster.puppets["w1"]
    cluster.say(leaver, messages.Leave, reason="preempted")
    assert names(cluster) == ["w0", "w2"]
    notice = leaver.last(messages.Rescale)
    assert not notice.urgent
    assert leaver.worker not in leaver.members
    assert leaver.last(messages.Released) is None
    cluster.commit(leaver, 1)
    cluster.puppets.pop("w1")
    cluster.settle(step=1)
    assert leaver.last(messages.Released) is not None
    assert phase(cluster) is Phase.ACTIVE
    assert cluster.machine.state.generation == 2


def test_a_leaver_that_dies_on_its_way_out_makes_the_drain_urgent():
    cluster = running(3)
    leaver = cluster.puppets["w1"]
    cluster.say(leaver, messages.Leave)
    cluster.disconnect(leaver)
    assert cluster.machine.state.generation == 3
    assert cluster.puppets["w0"].last(messages.Rescale).urgent


def test_scaling_down_retires_the_highest_ranks():
    cluster = running(4)
    cluster.feed(commands.Scale(2, "me"))
    assert names(cluster) == ["w0", "w1"]
    retired = [cluster.puppets.pop("w2"), cluster.puppets.pop("w3")]
    cluster.settle(step=1)
    assert all(puppet.last(messages.Released) for puppet in retired)
    assert cluster.machine.state.desired_workers == 2
    assert phase(cluster) is Phase.ACTIVE


def test_scaling_up_lets_more_workers_in():
    cluster = running(2, desired_workers=2)
    cluster.join("spare")
    cluster.pass_time(100)
    assert names(cluster) == ["w0", "w1"]
    cluster.feed(commands.Scale(3, "me"))
    cluster.pass_time(STABILITY)
    assert names(cluster) == ["w0", "w1", "spare"]


@pytest.mark.parametrize("workers", [0, 1, 9])
def test_a_target_outside_the_limits_is_refused_and_changes_nothing(workers):
    cluster = running(3, min_workers=2, max_workers=8)
    with pytest.raises(ConfigurationError, match="must lie between min_workers"):
        cluster.feed(commands.Scale(workers, "me"))
    assert cluster.machine.state.desired_workers is None


def test_a_target_that_was_chosen_without_knowing_of_the_latest_one_is_refused():
    cluster = running(3, max_workers=8)
    seen = cluster.machine.state.target_version
    cluster.feed(commands.Scale(5, "an operator"))
    with pytest.raises(ConflictError, match="the target changed to 5 since this request"):
        cluster.feed(commands.Scale(2, "a launcher", expected=seen))
    assert cluster.machine.state.desired_workers == 5
    assert len(names(cluster)) == 3
    cluster.restart()
    cluster.feed(commands.Scale(4, "a launcher", expected=seen + 1))
    assert cluster.machine.state.desired_workers == 4


def test_a_run_that_starts_over_shows_its_new_steps():
    cluster = running(1)
    cluster.settle(step=400)
    assert cluster.machine.state.progress.step == 400
    cluster.disconnect(cluster.puppets["w0"])
    cluster.feed(commands.ReportExit("w0", "it was killed"))
    cluster.join("w1")
    cluster.pass_time(STABILITY)
    cluster.settle(step=0)
    assert cluster.machine.state.progress.step == 0


def test_an_operator_can_make_a_worker_leave():
    cluster = running(3)
    cluster.feed(commands.Remove("w0", "me"))
    assert names(cluster) == ["w1", "w2"]
    assert "me asked for it" in last_reason(cluster)


def test_the_run_is_complete_when_all_members_have_finished():
    cluster = running(2)
    w0, w1 = cluster.puppets["w0"], cluster.puppets["w1"]
    cluster.say(w0, messages.Finish, committed_step=0)
    assert phase(cluster) is Phase.FINISHING
    cluster.disconnect(w0)
    cluster.say(w1, messages.Finish, committed_step=0)
    assert cluster.machine.state.ended.outcome == "completed"
    late = cluster.join("late")
    assert late.last(messages.Ended).outcome == "completed"


def test_a_member_that_finishes_alone_is_left_behind_and_the_others_go_on():
    cluster = running(2)
    cluster.say(cluster.puppets["w0"], messages.Finish, committed_step=0)
    cluster.pass_time(RESCALE)
    assert cluster.machine.state.ended is None
    assert names(cluster) == ["w1"]
    cluster.settle(step=1)
    assert phase(cluster) is Phase.ACTIVE


def test_a_broken_collective_shows_at_once_that_a_member_finished_alone():
    cluster = running(2)
    cluster.say(cluster.puppets["w0"], messages.Finish, committed_step=0)
    cluster.say(cluster.puppets["w1"], messages.Suspect, reason="its peer is gone")
    cluster.pass_time(0.2)
    assert names(cluster) == ["w1"]


def test_a_member_that_is_lost_before_it_confirms_the_end_makes_the_run_unfinished():
    cluster = running(2)
    cluster.say(cluster.puppets["w0"], messages.Finish, committed_step=0)
    cluster.disconnect(cluster.puppets["w1"])
    assert cluster.machine.state.ended.outcome == "stopped"
    assert "w1 did not confirm" in cluster.machine.state.ended.reason


def test_a_restarted_coordinator_remembers_who_has_finished():
    cluster = running(2)
    w0, w1 = cluster.puppets["w0"], cluster.puppets["w1"]
    cluster.say(w0, messages.Finish, committed_step=0)
    del cluster.puppets["w0"]
    cluster.restart()
    cluster.reconnect(w1)
    cluster.say(w1, messages.Finish, committed_step=0)
    cluster.pass_time(SILENCE + 3)
    assert cluster.machine.state.ended.outcome == "completed"


def test_a_newcomer_cannot_finish_a_run_that_it_did_not_train_in():
    cluster = running(2)
    w2 = cluster.join("w2")
    cluster.say(w2, messages.Ready, committed_step=9)
    cluster.say(w2, messages.Formed)
    cluster.say(w2, messages.Finish, generation=1, committed_step=9)
    assert phase(cluster) is Phase.ACTIVE
    cluster.pass_time(RESCALE)
    assert cluster.machine.state.ended is None


def test_nobody_can_finish_before_the_first_step():
    cluster = running(2, step=None)
    cluster.say(cluster.puppets["w0"], messages.Finish, committed_step=-1)
    assert phase(cluster) is Phase.ACTIVE


def with_goal(count, steps):
    cluster = SimulatedCluster(config(), desired_workers=count)
    cluster.goal = Goal(steps=steps)
    for number in range(count):
        cluster.join(f"w{number}")
    cluster.settle(step=0)
    return cluster


def test_a_run_is_complete_only_if_its_goal_is_reached():
    for step, outcome in ((299, "completed"), (175, "stopped")):
        cluster = with_goal(2, 300)
        for puppet in cluster.members():
            cluster.say(puppet, messages.Finish, committed_step=step, reason="SIGUSR2")
        assert cluster.machine.state.ended.outcome == outcome
    assert cluster.machine.state.ended.reason == "stopped at step 176 of 300: SIGUSR2"


def test_the_last_member_hands_its_state_over_before_it_leaves():
    cluster = with_goal(1, 300)
    w0, joiner = cluster.puppets["w0"], cluster.join("w1")
    cluster.say(w0, messages.Leave, reason="SIGTERM", together=True, stops_if_last=True)
    assert names(cluster) == ["w0", "w1"]
    cluster.settle()
    assert joiner.last(messages.FormationNotice).target_step == 0
    assert names(cluster) == ["w1"], "w0 goes once w1 has the state"
    cluster.answer(joiner)
    assert w0.last(messages.Released) is not None
    cluster.say(joiner, messages.Formed)
    assert phase(cluster) is Phase.ACTIVE


def test_the_last_member_hands_its_state_over_to_joiners_that_are_still_forming():
    cluster = with_goal(1, 300)
    w0 = cluster.puppets["w0"]
    cluster.feed(commands.Scale(2, "me"))
    joiner = cluster.join("w1")
    cluster.pass_time(STABILITY)
    assert names(cluster) == ["w0", "w1"]
    cluster.answer(joiner)
    cluster.say(w0, messages.Leave, reason="SIGTERM", stops_if_last=True)
    assert names(cluster) == ["w0", "w1"], "w1 has no state yet"
    cluster.settle()
    assert names(cluster) == ["w1"]


def test_the_last_member_is_told_that_nobody_can_take_over():
    cluster = with_goal(2, 300)
    w0, w1 = cluster.members()
    for puppet in (w0, w1):
        cluster.say(puppet, messages.Leave, reason="SIGTERM", together=True, stops_if_last=True)
        assert puppet.last(messages.LeaveRefused) is not None
    assert names(cluster) == ["w0", "w1"]


def test_a_worker_with_another_goal_or_other_terms_is_refused_by_name():
    cluster = with_goal(1, 300)
    cluster.goal, cluster.terms = Goal(steps=200), {"batch_size": "64"}
    other = cluster.join("other")
    refused = other.last(messages.Refused)
    assert refused.code == messages.REFUSED_TERMS
    assert "goal: 200 steps here, 300 steps in the run" in refused.reason
    assert "batch_size: 64 here, not given in the run" in refused.reason
    assert phase(cluster) is Phase.ACTIVE
    assert names(cluster) == ["w0"]


def test_a_worker_is_sent_the_runs_configuration_and_refused_with_another_one():
    cluster = with_goal(1, 300)
    assert cluster.puppets["w0"].last(messages.Welcome).config == config()
    cluster.worker_config = config()
    assert cluster.join("same").last(messages.Refused) is None
    cluster.worker_config = config(lr_adaptation_strategy=AdaptationStrategy.NONE, min_workers=2)
    refused = cluster.join("other").last(messages.Refused)
    assert refused.code == messages.REFUSED_TERMS
    assert "lr_adaptation_strategy: none here, linear in the run" in refused.reason
    assert "min_workers: 2 here, 1 in the run" in refused.reason


def test_terms_survive_a_restart_and_are_replaced_only_when_nobody_has_the_state():
    cluster = with_goal(1, 300)
    w0 = cluster.puppets["w0"]
    cluster.restart()
    cluster.reconnect(w0)
    cluster.goal = Goal(steps=500)
    assert cluster.join("w1").last(messages.Refused).code == messages.REFUSED_TERMS
    cluster.disconnect(w0)
    assert cluster.join("w1").last(messages.Refused).code == messages.REFUSED_TERMS
    cluster.feed(commands.ReportExit("w0", "exit code 1", w0.pid))
    assert cluster.join("w1").last(messages.Refused) is None
    assert cluster.machine.state.terms.goal == Goal(steps=500)


def test_an_exception_in_user_code_is_a_loss_or_the_end_of_the_run():
    cluster = running(3)
    cluster.say(cluster.puppets["w1"], messages.Abort, reason="KeyError: 3", traceback="tb")
    assert names(cluster) == ["w0", "w2"]
    cluster.say(cluster.puppets["w0"], messages.Abort, reason="KeyError: 3", fatal=True)
    assert cluster.machine.state.ended.outcome == "aborted"
    assert "KeyError: 3" in cluster.puppets["w2"].last(messages.Ended).reason


def test_an_operator_can_stop_the_run():
    cluster = running(2)
    cluster.feed(commands.Stop("enough", "me"))
    assert cluster.puppets["w0"].last(messages.Ended).outcome == "stopped"
    assert cluster.machine.next_deadline() is None


# Pausing


def test_below_the_minimum_training_pauses_and_goes_on_when_somebody_joins():
    cluster = running(2, min_workers=2)
    cluster.disconnect(cluster.puppets["w1"])
    assert phase(cluster) is Phase.PAUSED
    assert cluster.machine.state.rescale_log.history[-1].paused
    cluster.answer_all()
    assert phase(cluster) is Phase.PAUSED
    cluster.join("new")
    assert phase(cluster) is Phase.RESCALING
    assert names(cluster) == ["w0", "new"]
    cluster.settle(step=1)
    assert phase(cluster) is Phase.ACTIVE


def test_a_pause_longer_than_the_rescale_timeout_ends_the_run():
    cluster = running(2, min_workers=2)
    survivor = cluster.puppets["w0"]
    cluster.disconnect(cluster.puppets["w1"])
    cluster.pass_time(RESCALE - 0.1)
    assert phase(cluster) is Phase.PAUSED
    cluster.pass_time(0.1)
    assert phase(cluster) is Phase.ENDED
    assert "at least 2 are needed" in survivor.last(messages.Ended).reason
    assert survivor.last(messages.Ended).emergency


def test_losing_everybody_pauses_and_keeps_the_generation():
    cluster = running(1)
    cluster.disconnect(cluster.puppets["w0"])
    assert phase(cluster) is Phase.PAUSED
    cluster.join("w0")
    assert cluster.machine.state.generation == 3
    assert names(cluster) == ["w0"]


# Bounded waits


def test_a_member_that_does_not_answer_the_barrier_is_dropped():
    cluster = running(3, failure_tolerance_percentage=100)
    cluster.disconnect(cluster.puppets["w2"])
    mute = cluster.puppets["w1"]
    cluster.answer(cluster.puppets["w0"])
    cluster.pass_time(RESCALE)
    assert names(cluster) == ["w0"]
    assert "did not answer the rescale barrier within 30000 ms" in last_reason(cluster)
    assert mute.last(messages.Refused).code == messages.REFUSED_FENCED


def test_a_member_that_does_not_form_is_dropped():
    cluster = running(3, failure_tolerance_percentage=100)
    cluster.disconnect(cluster.puppets["w2"])
    cluster.answer_all()
    cluster.say(cluster.puppets["w0"], messages.Formed)
    cluster.pass_time(RESCALE)
    assert names(cluster) == ["w0"]
    assert "did not form the new group" in last_reason(cluster)


def test_a_barrier_never_gives_up_before_silence_could_be_noticed():
    machine = Machine(ClusterState(config(rescale_timeout_ms=0), now=0.0))
    assert machine.state.timeouts.barrier == SILENCE


# Suspicion


def test_a_suspicion_waits_for_a_broken_stream_that_explains_it():
    cluster = running(3)
    cluster.say(cluster.puppets["w0"], messages.Suspect, reason="connection reset")
    cluster.disconnect(cluster.puppets["w1"])
    assert cluster.machine.state.generation == 2
    cluster.pass_time(1)
    assert cluster.machine.state.generation == 2


def test_a_suspicion_without_a_culprit_starts_a_new_generation_with_everybody():
    cluster = running(3)
    w2 = cluster.puppets["w2"].worker.id
    cluster.say(cluster.puppets["w0"], messages.Suspect, worker_id=w2, reason="timed out")
    cluster.pass_time(1)
    assert cluster.machine.state.generation == 2
    assert names(cluster) == ["w0", "w1", "w2"]
    assert "w0 reports a broken collective and suspects w2: timed out" in last_reason(cluster)


# Fencing


def test_a_message_of_an_older_generation_changes_nothing_and_is_told_so():
    cluster = running(3)
    w0 = cluster.puppets["w0"]
    cluster.disconnect(cluster.puppets["w2"])
    cluster.answer(w0, generation=1)
    cluster.answer(cluster.puppets["w1"])
    assert phase(cluster) is Phase.RESCALING
    assert "is not 2, the current one" in w0.last(messages.Stale).reason
    assert cluster.machine.state.stale_messages == 1


def test_a_zombie_is_fenced_and_may_come_back_as_a_newcomer():
    cluster = running(3)
    zombie = cluster.puppets.pop("w1")
    cluster.pass_time(SILENCE)
    cluster.settle(step=1)
    cluster.reconnect(zombie)
    refused = zombie.last(messages.Refused)
    assert refused.code == messages.REFUSED_FENCED
    assert "join again as a newcomer" in refused.reason
    assert not zombie.is_connected
    cluster.join("w1")
    cluster.pass_time(STABILITY)
    assert names(cluster) == ["w0", "w2", "w1"]


def test_a_fenced_stream_can_say_nothing_more():
    cluster = running(3)
    zombie = cluster.puppets.pop("w1")
    cluster.pass_time(SILENCE)
    before = len(cluster.journal)
    cluster.say(zombie, messages.Finish, committed_step=1)
    assert phase(cluster) is Phase.RESCALING
    assert len(cluster.journal) == before


def test_a_second_worker_with_the_same_id_is_refused():
    cluster = running(2)
    impostor = cluster.join("w1")
    assert impostor.last(messages.Refused).code == messages.REFUSED_DUPLICATE
    assert cluster.machine.state.generation == 1


def test_a_message_with_another_incarnation_than_the_hello_is_refused():
    cluster = running(2)
    w0 = cluster.puppets["w0"]
    cluster.say(w0, messages.Heartbeat, sequence=1, incarnation="somebody else")
    assert w0.last(messages.Refused).code == messages.REFUSED_FENCED


def test_another_protocol_version_is_refused():
    cluster = running(1)
    puppet = cluster.join("x")
    cluster.hello(puppet, None, protocol=99)
    assert puppet.last(messages.Refused).code == messages.REFUSED_INVALID


def test_a_worker_on_a_new_stream_goes_on_and_its_old_stream_is_closed():
    cluster = running(2)
    w0 = cluster.puppets["w0"]
    old = w0.connection
    cluster.reconnect(w0)
    cluster.feed(inputs.Closed(old, "its stream broke", cluster.clock()))
    assert cluster.machine.state.generation == 1
    assert w0.last(messages.Welcome).workers == cluster.machine.state.roster.members


# Restarting


def test_a_restarted_coordinator_has_the_same_generation_and_members():
    cluster = running(3)
    cluster.restart()
    assert phase(cluster) is Phase.ACTIVE
    assert cluster.machine.state.generation == 1
    assert names(cluster) == ["w0", "w1", "w2"]
    for puppet in list(cluster.puppets.values()):
        rescales = [m for m in puppet.received if isinstance(m, messages.Rescale)]
        cluster.reconnect(puppet)
        assert [m for m in puppet.received if isinstance(m, messages.Rescale)] == rescales
    cluster.pass_time(100)
    assert cluster.machine.state.generation == 1


def test_a_worker_lost_while_the_coordinator_was_away_is_noticed():
    cluster = running(3)
    cluster.restart()
    cluster.puppets.pop("w1")
    for puppet in list(cluster.puppets.values()):
        cluster.reconnect(puppet)
    cluster.pass_time(SILENCE)
    assert cluster.machine.state.generation == 1
    cluster.pass_time(2 * RECONNECT_MOST)
    assert names(cluster) == ["w0", "w2"]
    assert "did not come back" in last_reason(cluster)


def test_a_worker_restarted_while_the_coordinator_was_away_is_a_newcomer():
    cluster = running(3)
    cluster.restart()
    fresh = cluster.join("w1")
    assert "replaced by another one" in last_reason(cluster)
    assert names(cluster) == ["w0", "w1", "w2"]
    assert fresh.generation == cluster.machine.state.generation == 2
    for name in ("w0", "w2"):
        cluster.reconnect(cluster.puppets[name])
    cluster.answer_all()
    reports = fresh.last(messages.FormationNotice).reports
    assert [report.is_newcomer for report in reports] == [False, True, False]


def test_a_generation_that_was_decided_but_not_announced_is_announced_after_the_restart():
    cluster = running(3)
    crashed = cluster.puppets.pop("w2")
    event = inputs.Closed(crashed.connection, "its stream broke", cluster.clock())
    for instruction in cluster.machine.handle(event, cluster.clock()):
        if isinstance(instruction, Record):
            cluster._carry_out(instruction)
    cluster.restart()
    assert phase(cluster) is Phase.RESCALING
    for puppet in list(cluster.puppets.values()):
        cluster.reconnect(puppet)
        assert puppet.generation == 2
    cluster.settle(step=1)
    assert phase(cluster) is Phase.ACTIVE


def test_a_restart_while_forming_is_carried_on_from_what_the_workers_say_again():
    cluster = running(3)
    cluster.disconnect(cluster.puppets["w2"])
    cluster.answer_all()
    cluster.restart()
    for puppet in list(cluster.puppets.values()):
        cluster.reconnect(puppet)
        cluster.answer(puppet)
        cluster.say(puppet, messages.Formed)
    assert phase(cluster) is Phase.ACTIVE
    assert cluster.machine.state.generation == 2


def test_the_target_and_the_end_survive_a_restart():
    cluster = running(2, desired_workers=2)
    cluster.feed(commands.Scale(3, "me"))
    cluster.restart()
    assert cluster.machine.state.desired_workers == 3
    cluster.feed(commands.Stop("enough", "me"))
    cluster.restart()
    assert phase(cluster) is Phase.ENDED
    assert cluster.machine.state.ended.outcome == "stopped"


def test_a_generation_is_never_used_again_even_if_the_journal_is_gone():
    cluster = running(2)
    old = cluster.puppets["w0"]
    old.generation = 41
    cluster.journal.clear()
    cluster.restart()
    cluster.reconnect(old)
    cluster.join("w0")
    cluster.pass_time(STABILITY)
    assert cluster.machine.state.generation == 42


# Records


def test_a_decision_is_journaled_before_it_is_announced():
    cluster = running(3)
    crashed = cluster.puppets["w1"]
    event = inputs.Closed(crashed.connection, "its stream broke", cluster.clock())
    kinds = [type(i) for i in cluster.machine.handle(event, cluster.clock())]
    assert kinds.index(Record) < kinds.index(Send)


def test_a_rescale_is_explained_with_its_times():
    cluster = running(3)
    crashed = cluster.puppets["w1"]
    cluster.clock.advance(0.2)
    cluster.feed(inputs.Closed(crashed.connection, "its stream broke", cluster.clock() - 0.05))
    cluster.puppets.pop("w1")
    cluster.clock.advance(0.01)
    cluster.feed(inputs.Announced(2))
    cluster.clock.advance(0.02)
    cluster.answer_all()
    cluster.clock.advance(0.03)
    for puppet in cluster.members():
        cluster.say(puppet, messages.Formed, moved={"shards": 2, "bytes": 100})
    cluster.clock.advance(0.04)
    cluster.commit(cluster.members()[0], 1)
    record = cluster.machine.state.rescale_log.history[-1]
    times = (
        record.detection_ms,
        record.decision_ms,
        record.barrier_ms,
        record.forming_ms,
        record.first_commit_ms,
    )
    assert times == pytest.approx((50, 10, 20, 30, 40))
    assert record.total_ms == pytest.approx(150)
    (departure,) = record.removed.values()
    assert (departure.kind, departure.worker) == (DepartureKind.FAILED, "w1")
    assert str(departure) == "w1 failed: its stream broke"
    assert record.moved == {"shards": 4, "bytes": 200}
    assert (record.old_size, record.new_size, record.type) == (3, 2, "scale_down")
    assert journal_records.replay(cluster.entries()).history[-1] == record
