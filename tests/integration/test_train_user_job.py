"""A user's job gives the same bits on any number of processes; so does activation checkpointing."""

import pytest
import torch
from tests.integration.train_cases import free_port
from tests.integration.user_job import OVERFLOWS, make_user_run, train_user_job
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tensorforge.testing.training_cluster import forking_context
from tensorforge.train import Run, RunConfig
from tensorforge.train.group.membership import FixedMembership

TOTAL = 16


@pytest.fixture(scope="session")
def processes():
    """Start the process that others are forked from before the leak check looks."""
    context = forking_context()
    first = context.Process(target=len, args=("",))
    first.start()
    first.join()
    return context


def on_processes(context, world_size, work, *arguments):
    """What `work(membership, *arguments)` returns on each of so many processes."""
    answers, master = context.SimpleQueue(), f"127.0.0.1:{free_port()}"
    members = [
        context.Process(target=_member, args=(work, rank, world_size, master, answers, arguments))
        for rank in range(world_size)
    ]
    for member in members:
        member.start()
    found = [answers.get() for _ in members]
    for member in members:
        member.join()
    answers.close()
    return found


def _member(work, rank, world_size, master, answers, arguments):
    answers.put(work(FixedMembership(rank, world_size, master), *arguments))


def user_job(membership, dtype):
    run, average = make_user_run(membership, dtype=dtype)
    return train_user_job(run, average, TOTAL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_users_job_is_the_same_on_any_number_of_processes(processes, dtype):
    run, average = make_user_run(dtype=dtype)
    alone = train_user_job(run, average, TOTAL)
    assert run.state.skipped_steps >= len(OVERFLOWS)
    assert average.updates == TOTAL - run.state.skipped_steps
    assert "skipped by loss scaling" in run.state.require_exactly_once()
    for size in (2, 3, 4):
        assert on_processes(processes, size, user_job, dtype) == [alone] * size


class Checkpointed(nn.Module):
    """Two blocks that share a layer, so that reentrant checkpointing accumulates its gradient twice."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(12, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self._block, x, use_reentrant=self.reentrant)
        return self.last(x)

    def _block(self, x):
        return F.dropout(torch.relu(self.shared(x)), 0.1, self.training)


def checkpointed_job(membership, reentrant):
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    source = torch.Generator().manual_seed(5)
    samples = [(torch.randn(12, generator=source), i % 4) for i in range(96)]
    config = RunConfig(batch_size=24, bucket_bytes=2048)
    with Run(model, optimizer, samples, config, membership=membership) as run:
        for step in run.steps(total=6):
            for x, y in step.batches():
                step.backward(F.cross_entropy(model(x), y))
            step.commit()
    return run.digest()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_of_both_kinds_works_on_any_number_of_processes(
    processes, reentrant
):
    alone = checkpointed_job(None, reentrant)
    assert on_processes(processes, 2, checkpointed_job, reentrant) == [alone] * 2
    assert on_processes(processes, 3, checkpointed_job, reentrant) == [alone] * 3
