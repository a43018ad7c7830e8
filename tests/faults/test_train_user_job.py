"""A user's job through failures: what belongs to a step happens once per step, whoever commits it and when."""

import ast

import pytest
from tests.integration.user_job import (
    OVERFLOWS,
    hammered_work,
    make_user_run,
    train_user_job,
    user_work,
)

from tensorforge.testing.storms import Storm, check_history, draw_storm

TOTAL = 40


@pytest.fixture(scope="module")
def undisturbed():
    run, average = make_user_run()
    return train_user_job(run, average, TOTAL)


def seen_by(running):
    """What the loops of the workers that ended by themselves saw."""
    return {path.stem: ast.literal_eval(path.read_text()) for path in running.folder.glob("*.seen")}


def test_the_average_is_updated_once_per_applied_step(undisturbed):
    _, losses, updates = undisturbed
    assert [number for number, _ in losses] == list(range(TOTAL))
    assert updates == TOTAL - len(OVERFLOWS)


@pytest.mark.parametrize("at_step", [5, OVERFLOWS[0], 20])
def test_a_step_committed_while_the_cluster_reforms_skips_nothing(cluster, undisturbed, at_step):
    digest, _, updates = undisturbed
    with cluster(main=user_work, arguments=(TOTAL, "b", at_step), workers=3) as running:
        for name in "abc":
            running.start_worker(name)
        running.wait_for_end()
        story = running.describe()
        assert running.exit_codes()["b"] == -9, story
        finals = {name: final["digest"] for name, final in running.finals().items()}
        assert set(finals.values()) == {digest}, story
        seen = seen_by(running)
        assert set(seen) == {"a", "c"}, story
        for found, steps, count in seen.values():
            assert (found, count) == (digest, updates), story
            assert steps == sorted(set(steps)), "the loop was told of a step twice"
        # Whoever was there from the beginning has seen every step, those too that were rolled forward.
        assert [] not in [steps for _, steps, _ in seen.values()]
        assert any(steps == list(range(TOTAL)) for _, steps, _ in seen.values()), story
        check_history(running.events(), TOTAL)


@pytest.mark.parametrize("seed", range(10))
def test_a_storm_changes_nothing_in_a_users_job(cluster, undisturbed, seed):
    digest, losses, _ = undisturbed
    victim = f"w{seed % 3}" if seed % 2 else ""
    arguments = (TOTAL, victim, 7 + seed)
    with cluster(main=user_work, arguments=arguments, workers=4, name=seed) as running:
        storm = Storm(running)
        storm.start(3)
        storm.run(draw_storm(seed, TOTAL, 4), timeout=60)
        story = f"{storm.carried_out}\n{running.describe()}"
        complete = {
            n: f["digest"] for n, f in running.finals().items() if f["outcome"] == "complete"
        }
        assert complete, story
        assert set(complete.values()) == {digest}, story
        check_history(running.events(), TOTAL)
        commits = [event for event in running.events() if event["kind"] == "commit"]
        found = {event["step"]: event["metrics"]["loss"] for event in commits}
        assert [(step, found[step]) for step in range(TOTAL)] == losses, story
        skipped = {event["step"] for event in commits if event["is_skipped"]}
        assert skipped == set(OVERFLOWS)


def test_reconnects_retries_and_saves_draw_nothing_from_the_users_streams(
    cluster, undisturbed, tmp_path
):
    """The coordinator is away for most of the run, so that both workers try to reconnect all the time."""
    arguments = (TOTAL, str(tmp_path / "checkpoints"))
    with cluster(main=hammered_work, arguments=arguments, workers=2) as running:
        for name in "ab":
            running.start_worker(name)
        running.wait_for_step(2)
        running.kill_coordinator()
        running.wait_for_step(TOTAL - 5)
        running.start_coordinator()
        running.wait_for_end()
        finals = {name: final["digest"] for name, final in running.finals().items()}
        assert finals == dict.fromkeys("ab", undisturbed[0]), running.describe()
