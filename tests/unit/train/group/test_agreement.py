from hypothesis import given
from hypothesis import strategies as st

from tensorforge.train.group.agreement import NOTHING_PREPARED, Facts, decide


def fact(committed, prepared=NOTHING_PREPARED, generation=1):
    return Facts(committed, prepared, generation, 0)


def test_members_at_one_step_go_on_from_there():
    verdict = decide([fact(4), fact(4), fact(4)])
    assert (verdict.target_step, verdict.roll_forward, verdict.newcomers) == (4, (), ())
    assert verdict.donors == (0, 1, 2)


def test_whoever_holds_the_gradient_of_an_applied_step_rolls_forward():
    verdict = decide([fact(5), fact(4, 5), fact(4, 5)])
    assert (verdict.target_step, verdict.roll_forward) == (5, (1, 2))
    assert verdict.donors == (0, 1, 2)


def test_a_newcomer_is_healed_by_all_others():
    verdict = decide([fact(7), fact(7), fact(-1, generation=0)])
    assert (verdict.donors, verdict.newcomers) == ((0, 1), (2,))


def test_a_step_that_somebody_did_not_prepare_is_done_again():
    verdict = decide([fact(4, 5), fact(4)])
    assert (verdict.target_step, verdict.roll_forward) == (4, ())


def test_a_step_that_the_dead_may_have_applied_is_applied_by_all_survivors():
    verdict = decide([fact(4, 5), fact(4, 5), fact(-1, generation=0)])
    assert (verdict.target_step, verdict.roll_forward) == (5, (0, 1))
    assert verdict.newcomers == (2,)


def test_one_who_was_away_has_no_say_in_a_later_generations_step():
    verdict = decide([fact(4, 5, generation=6), fact(4, generation=5)])
    assert (verdict.target_step, verdict.roll_forward, verdict.newcomers) == (5, (0,), (1,))


def test_one_that_was_frozen_is_healed():
    verdict = decide([fact(9, generation=4), fact(3, 4, generation=2)])
    assert (verdict.donors, verdict.newcomers) == ((0,), (1,))


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
    facts = [fact(step) if fate == "applied" else fact(step - 1, step) for fate in survivors]
    facts += [fact(-1, generation=0)] * newcomers
    verdict = decide(facts)
    assert verdict.target_step == step
    assert verdict.donors == tuple(range(len(survivors)))
