"""Elastic training: one model, trained to the same bits on any number of workers that may come and go.

Each step takes samples from a fixed number of shards. The members of a generation divide the shards, each
computes its own, the gradients are added along one tree, all members vote, and all apply the step or none
does. If a member is lost, the others form a new generation, agree on one state, and finish the step. The
walk of a step:

1. `loop/run.py: Run.steps` yields a `Step`, which `loop/engine.py: StepEngine.next_step` makes: this worker's
   share of the shards. If there is no group, it first gets one from `group/session.py: Session.form`.
2. `loop/step.py: Step.batches` gets each micro-batch from `data/batch_loading.py: BatchSource.load`.
3. `loop/step.py: Step.backward` leaves the gradients in `gradients/shard_gradients.py: StepGradients`. In the
   last backward pass `gradients/reduction.py: Exchange` sends sums while others are computed.
4. `loop/step.py: Step.commit` calls `loop/engine.py: StepEngine.commit`. It completes the sum over all members
   (`gradients/reduction.py: Exchange.finish`), votes (`group/gloo_group.py: GenerationGroup.all_reduce`) and
   applies the step (`loop/training_state.py: TrainingState.commit`).
5. `loop/run.py: Run._after_commit` reports the step and lets `run_checkpoints.py: Checkpointer` save it.

What needs torch is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from tensorforge.train.run_config import LossScaling, RunConfig

if TYPE_CHECKING:
    from tensorforge.catalog import CheckpointSchedule
    from tensorforge.train.data.loading_processes import Loading
    from tensorforge.train.data.local_shards import LocalShards
    from tensorforge.train.evaluation import Evaluation
    from tensorforge.train.loop.run import Run
    from tensorforge.train.loop.step import Step
    from tensorforge.train.run_checkpoints import CheckpointPlan

__all__ = [
    "CheckpointPlan",
    "CheckpointSchedule",
    "Evaluation",
    "Loading",
    "LocalShards",
    "LossScaling",
    "Run",
    "RunConfig",
    "Step",
]

_HOMES = {
    "CheckpointPlan": "run_checkpoints",
    "CheckpointSchedule": "run_checkpoints",
    "Evaluation": "evaluation",
    "Loading": "data.loading_processes",
    "LocalShards": "data.local_shards",
    "Run": "loop.run",
    "Step": "loop.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
