"""Random storms of kills, freezes, leaves, joins and coordinator deaths: the model is the same, every time."""

import pytest

from tensorforge.cluster.ended_runs import EXIT_COMPLETE, EXIT_UNFINISHED
from tensorforge.environment import STORMS
from tensorforge.testing.storms import Storm, check_history, draw_storm
from tensorforge.train import Loading

TOTAL = 40
CASES = [("mlp", "sgd"), ("transformer", "adamw"), ("convnet", "sgd"), ("transformer", "sgd")]


def survive(cluster, alone, seed):
    kind, optimizer = CASES[seed % len(CASES)]
    digest, losses = alone(kind, optimizer, TOTAL)
    # Every other storm hits workers that send while they compute, in many small buckets.
    settings = {"bucket_bytes": 600} if seed // 4 % 2 else {}
    if seed % 5 == 4:
        settings["loading"] = Loading(num_workers=1)
    with cluster(kind, optimizer, TOTAL, workers=4, name=seed, settings=settings) as running:
        storm = Storm(running)
        storm.start(3)
        storm.run(draw_storm(seed, TOTAL, 4), timeout=60)
        finals = running.finals()
        story = f"{storm.carried_out}\n{running.describe()}"
        complete = {name: f["digest"] for name, f in finals.items() if f["outcome"] == "complete"}
        assert complete, story
        assert set(complete.values()) == {digest}, story
        assert set(running.exit_codes().values()) <= {EXIT_COMPLETE, EXIT_UNFINISHED}, story
        check_history(running.events(), TOTAL)
        found = {e["step"]: e["metrics"]["loss"] for e in running.events() if e["kind"] == "commit"}
        assert [found[step] for step in range(TOTAL)] == losses


@pytest.mark.parametrize("seed", range(20))
def test_a_storm_changes_nothing(cluster, alone, seed):
    survive(cluster, alone, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1000 + STORMS.read()))
def test_many_more_storms_change_nothing(cluster, alone, seed):
    survive(cluster, alone, seed)
