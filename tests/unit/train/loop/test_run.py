"""The run in one process: its promises to the training loop, and what it says to mistakes."""

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, which leaves a folder behind
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import IterableDataset, TensorDataset

from tensorforge.elastic.protocol.messages import Verdict
from tensorforge.errors import ClosedError, ConflictError, InvalidInputError
from tensorforge.train import Evaluation, Run, RunConfig
from tensorforge.train.group.gloo_group import GroupAbortedError
from tensorforge.train.run_log import read_run_logs


def dataset(size=50):
    source = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=source), torch.arange(size) % 2)


def make(model=None, config=None, **options):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config or RunConfig(batch_size=10, shards=4)
    return Run(model, optimizer, options.pop("data", dataset()), settings, **options)


def go(run, **until):
    steps = []
    with run:
        for step in run.steps(**until):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()
            steps.append(step)
    return steps


def test_every_sample_of_an_epoch_comes_exactly_once():
    seen = []
    with make(
        data=TensorDataset(torch.arange(47.0)[:, None].repeat(1, 4), torch.zeros(47).long())
    ) as run:
        for step in run.steps(epochs=1):
            for x, y in step.batches():
                seen += x[:, 0].int().tolist()
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()
    assert sorted(seen) == list(range(47))
    assert run.state.epochs_proven == 1
    assert run.outcome == "complete"


def test_a_class_of_ones_own_made_from_tensors_gives_its_own_samples():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x * 2, y

    x, y = dataset().tensors
    go(doubled := make(data=Doubled(x, y)), total=3)
    go(expected := make(data=TensorDataset(x * 2, y)), total=3)
    assert doubled.digest() == expected.digest()


def test_the_gradient_is_that_of_the_mean_over_the_whole_step():
    torch.manual_seed(0)
    model, data = nn.Linear(4, 2), dataset(10)
    x, y = data.tensors
    F.cross_entropy(model(x), y).backward()
    expected = model.weight.detach() - 0.1 * model.weight.grad
    model.zero_grad()
    run = make(model, RunConfig(batch_size=10, shards=3), data=data)
    go(run, total=1)
    torch.testing.assert_close(model.weight.detach(), expected)


def test_a_parameter_that_no_shard_used_is_left_alone():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
    idle = model["idle"].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    with Run(model, optimizer, dataset(), RunConfig(batch_size=10, shards=4)) as run:
        for step in run.steps(total=2):
            for x, y in step.batches():
                step.backward(F.cross_entropy(model["used"](x), y))
            step.commit()
    assert torch.equal(model["idle"].weight, idle)


def test_metrics_and_evaluations_are_means_over_samples():
    def function(batch):
        return {"label": batch[1].float().mean()}

    evaluation = Evaluation(function, dataset(31), every=2, batch_size=7)
    run = make(config=RunConfig(batch_size=10, shards=4, metrics=("label",)), evaluation=evaluation)
    with run:
        for step in run.steps(total=5):
            for x, y in step.batches():
                step.log(label=y.float().mean())
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()
            assert 0 <= step.metrics["label"] <= 1
    mean = pytest.approx(15 / 31)
    assert evaluation.results == {1: {"label": mean}, 3: {"label": mean}}
    assert run.model.training


def test_a_scheduler_advances_per_step_or_per_epoch():
    rates = []
    for every in ("step", "epoch"):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        config = RunConfig(batch_size=25, shards=2, schedule_every=every)
        go(Run(model, optimizer, dataset(), config, scheduler=scheduler), epochs=2)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5**4, 0.5**2]


def test_the_callers_random_stream_is_left_alone():
    run = make()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    go(run, total=2)
    assert torch.equal(torch.rand(1), expected)


def test_gradients_can_be_changed_before_the_update():
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()

    def freeze():
        model.weight.grad.zero_()

    go(make(model, before_update=freeze), total=1)
    assert torch.equal(model.weight, before)


def test_a_forgotten_commit_is_told():
    with make() as run, pytest.raises(ConflictError, match=r"step.commit\(\) was not called"):
        for step in run.steps(total=2):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))


def test_a_forgotten_backward_is_told():
    with make() as run, pytest.raises(ConflictError, match=r"step.backward\(loss\) was not called"):
        for step in run.steps(total=1):
            for _ in step.batches():
                pass


def test_batches_that_were_not_taken_are_told():
    with make() as run, pytest.raises(ConflictError, match="were not taken"):
        for step in run.steps(total=1):
            step.commit()


def test_a_loss_per_sample_is_refused():
    with make() as run, pytest.raises(InvalidInputError, match="one element"):
        for step in run.steps(total=1):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y, reduction="none"))


def test_an_unknown_metric_is_refused():
    with make() as run, pytest.raises(InvalidInputError, match=r"RunConfig\.metrics"):
        for step in run.steps(total=1):
            for _ in step.batches():
                step.log(speed=1.0)


def test_backward_outside_the_loop_is_refused():
    with make() as run, pytest.raises(ConflictError, match="belongs inside"):
        for step in run.steps(total=1):
            step.backward(torch.zeros((), requires_grad=True))


@pytest.mark.parametrize("until", [{}, {"epochs": 1, "total": 2}, {"total": -1}])
def test_how_far_to_go_must_be_said_once(until):
    with make() as run, pytest.raises(InvalidInputError):
        next(run.steps(**until))


def test_a_run_that_is_over_is_over():
    run = make()
    go(run, total=1)
    with pytest.raises(ClosedError, match="complete"):
        next(run.steps(total=2))


class Stream(IterableDataset):
    def __len__(self):
        return 50

    def __iter__(self):
        return iter(dataset())


@pytest.mark.parametrize("data", [iter([]), TensorDataset(torch.empty(0, 4)), Stream()])
def test_a_dataset_without_samples_or_length_is_refused(data):
    with pytest.raises(InvalidInputError, match="dataset"):
        make(data=data)


def test_a_model_without_parameters_is_refused():
    model = nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InvalidInputError, match="no parameter"):
        Run(model, optimizer, dataset(), RunConfig(batch_size=4))


class BreakingGroup:
    """Two members that have prepared the same step; it breaks when they compare their states."""

    rank, world_size = 0, 2

    def gather_bytes(self, data):
        raise GroupAbortedError("a test")


def test_a_step_that_is_rolled_forward_is_logged_even_if_the_group_breaks_then(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TENSORFORGE_RUN_DIR", str(tmp_path))
    run = make()
    step = next(run.steps(total=5))
    for x, y in step.batches():
        step.backward(F.cross_entropy(run.model(x), y))
    run._engine.prepared = run._engine._prepare(step)
    verdict = Verdict(target_step=0, roll_forward=((0, 2),), donors=((0, 2),))
    with pytest.raises(GroupAbortedError):
        run._agree(BreakingGroup(), verdict)
    run.close()
    assert run.state.committed_step == 0
    assert [e["step"] for e in read_run_logs(tmp_path) if e["kind"] == "commit"] == [0]
