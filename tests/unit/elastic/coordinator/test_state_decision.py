from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic.coordinator import state_decision
from tensorforge.elastic.protocol.messages import MemberReport


class Decision:
    """A verdict with its ranks listed one by one."""

    def __init__(self, verdict, size):
        everybody = range(size)
        self.target_step, self.is_fresh = verdict.target_step, verdict.is_fresh
        self.roll_forward = tuple(r for r in everybody if verdict.rolls_forward(r))
        self.donors = verdict.donor_ranks()
        self.newcomers = tuple(r for r in everybody if r not in self.donors)


def decide(reports):
    return Decision(state_decision.decide(reports), len(reports))


def report(committed, prepared=None, generation=1):
    return MemberReport(
        committed_step=committed, prepared_step=prepared, last_generation=generation
    )


def test_a_run_that_nobody_has_begun_takes_the_state_of_rank_0():
    decision = decide([report(-1, generation=0)] * 3)
    assert decision.is_fresh
    assert (decision.donors, decision.newcomers) == ((0,), (1, 2))


def test_members_at_one_step_go_on_from_there():
    decision = decide([report(4), report(4), report(4)])
    assert (decision.target_step, decision.roll_forward, decision.newcomers) == (4, (), ())
    assert decision.donors == (0, 1, 2)


def test_whoever_holds_the_gradient_of_an_applied_step_rolls_forward():
    decision = decide([report(5), report(4, 5), report(4, 5)])
    assert (decision.target_step, decision.roll_forward) == (5, (1, 2))
    assert decision.donors == (0, 1, 2)


def test_a_newcomer_is_healed_by_all_others():
    decision = decide([report(7), report(7), report(-1, generation=0)])
    assert (decision.donors, decision.newcomers) == ((0, 1), (2,))


def test_a_step_that_somebody_did_not_prepare_is_done_again():
    decision = decide([report(4, 5), report(4)])
    assert (decision.target_step, decision.roll_forward) == (4, ())


def test_a_step_that_the_dead_may_have_applied_is_applied_by_all_survivors():
    decision = decide([report(4, 5), report(4, 5), report(-1, generation=0)])
    assert (decision.target_step, decision.roll_forward) == (5, (0, 1))
    assert decision.newcomers == (2,)


def test_one_who_was_away_has_no_say_in_a_later_generations_step():
    decision = decide([report(4, 5, generation=6), report(4, generation=5)])
    assert (decision.target_step, decision.roll_forward, decision.newcomers) == (5, (0,), (1,))


def test_one_that_was_frozen_is_healed():
    decision = decide([report(9, generation=4), report(3, 4, generation=2)])
    assert (decision.donors, decision.newcomers) == ((0,), (1,))


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.sampled_from(["applied", "prepared", "died"])), min_size=1, max_size=6),
    st.integers(0, 2),
)
def test_no_step_that_anybody_applied_is_ever_lost(step, members, newcomers):
    """Members of one generation that all voted; then each applied, was interrupted, or died."""
    survivors = [fate for (fate,) in members if fate != "died"]
    if not survivors:
        return
    reports = [report(step) if fate == "applied" else report(step - 1, step) for fate in survivors]
    reports += [report(-1, generation=0)] * newcomers
    decision = decide(reports)
    assert decision.target_step == step
    assert decision.donors == tuple(range(len(survivors)))
