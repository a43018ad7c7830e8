import pytest

from tensorforge.elastic import GlobalTrainingState
from tensorforge.errors import InvalidInputError


@pytest.mark.parametrize(
    "changes",
    [
        {"current_epoch": -1},
        {"current_step": 1.5},
        {"global_batch_size": True},
        {"learning_rate": float("nan")},
        {"learning_rate": -0.1},
    ],
)
def test_an_impossible_training_state_is_refused(changes):
    values = {
        "current_epoch": 0,
        "current_step": 0,
        "learning_rate": 0.1,
        "global_batch_size": 8,
        "active_worker_count": 1,
    }
    with pytest.raises(InvalidInputError, match=next(iter(changes))):
        GlobalTrainingState(**(values | changes))
