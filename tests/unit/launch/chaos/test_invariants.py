from tensorforge.launch.chaos import invariants


def commit(worker, step, samples=8, loss=1.0):
    metrics = {"loss": loss}
    return {
        "kind": "commit",
        "worker": worker,
        "step": step,
        "samples": samples,
        "metrics": metrics,
    }


def formed(worker, generation, committed, digest=None):
    found = {"kind": "formed", "worker": worker, "generation": generation}
    return {**found, "committed_step": committed, **({"digest": digest} if digest else {})}


def final(worker, digest="d", proof="all 8", step=1, outcome="complete"):
    found = {"kind": "final", "worker": worker, "digest": digest, "proof": proof}
    return {**found, "committed_step": step, "outcome": outcome}


def test_generations_that_go_back_are_found():
    assert invariants.generations_grow([1, 2, 5]).holds
    broken = invariants.generations_grow([1, 3, 2])
    assert not broken.holds
    assert broken.detail == "generation 2 was seen after 3"
    assert not invariants.generations_grow([]).holds


def test_steps_that_are_doubled_different_or_lost_are_found():
    check = invariants.steps_are_committed_once
    good = [commit("a", 0), commit("b", 0), commit("a", 1), commit("b", 1)]
    assert check(good).holds
    assert "committed step 1 after 1" in check([*good, commit("a", 1)]).detail
    assert "committed step 0 after 1" in check([*good, commit("b", 0)]).detail
    assert "another step 2" in check([*good, commit("a", 2), commit("b", 2, loss=2.0)]).detail
    assert "another step 2" in check([*good, commit("a", 2), commit("b", 2, samples=7)]).detail
    assert "no worker committed the steps [2, 3]" in check([*good, commit("a", 4)]).detail
    assert not check([]).holds


def test_a_step_that_was_rolled_forward_is_not_lost():
    lines = [commit("a", 0), formed("b", 2, 1), commit("b", 2)]
    assert invariants.steps_are_committed_once(lines).holds


def test_members_that_disagree_are_found():
    check = invariants.members_agree
    assert check([formed("a", 2, 5, "x"), formed("b", 2, 5, "x"), formed("a", 3, 9, "y")]).holds
    broken = check([formed("a", 2, 5, "x"), formed("b", 2, 5, "y")])
    assert not broken.holds
    assert broken.detail == "at generation 2 there are 2: x: a; y: b"
    assert "the end (step 1)" in check([final("a", "x"), final("b", "y")]).detail
    assert check([final("a", "x", step=1), final("b", "y", step=2)]).holds


def test_a_run_that_ended_without_proof_is_found():
    check = invariants.ledger_is_complete
    assert check([final("a"), final("b")]).holds
    assert not check([]).holds
    assert not check([final("a", outcome="left")]).holds
    assert "the proofs differ" in check([final("a"), final("b", proof="all 7")]).detail


def test_a_run_that_did_not_survive_is_found():
    assert invariants.run_goes_on("completed", "", False).holds
    assert invariants.run_goes_on(None, "", True).holds
    assert not invariants.run_goes_on(None, "", False).holds
    broken = invariants.run_goes_on("aborted", "too few", True)
    assert (broken.holds, broken.detail) == (False, "aborted: too few")
