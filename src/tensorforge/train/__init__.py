"""Elastic training: the run, its steps, and the machinery that gives the same model whatever happens.

    tree, work, placement, seeds, config   pure: who adds what in which order, who computes what
    layout, gradients, reduction           a step's gradient: per shard, along the tree, over the members
    group, membership, session             the generations: their process groups, how a worker follows them
    agreement, healing, state              one state on all members after every change
    loading, loading_processes             micro-batches, loaded when they are needed or ahead of that
    local_shards, shard_plane              data that workers hold, moved by the plan while training goes on
    progress, engine, step, run            what a training script sees, and what works behind it

What needs torch is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from tensorforge.train.run_config import RunConfig

if TYPE_CHECKING:
    from tensorforge.train.data.loading_processes import Loading
    from tensorforge.train.data.local_shards import LocalShards
    from tensorforge.train.evaluation import Evaluation
    from tensorforge.train.loop.run import Run
    from tensorforge.train.loop.step import Step
    from tensorforge.train.run_checkpoints import CheckpointPlan

__all__ = ["CheckpointPlan", "Evaluation", "Loading", "LocalShards", "Run", "RunConfig", "Step"]

_HOMES = {
    "CheckpointPlan": "run_checkpoints",
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
