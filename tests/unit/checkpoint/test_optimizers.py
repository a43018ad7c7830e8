import pytest
import torch
from tests.unit.checkpoint.models import build, same, train

from tensorforge.checkpoint import CheckpointError

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.01}),
        (torch.optim.Adafactor, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.LBFGS, {"lr": 0.01}),
    ],
)
def test_optimizers_of_all_shapes_come_back(checkpoint, make, options):
    model = build()
    optimizer = make(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        torch.manual_seed(7)
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    checkpoint.save(model, optimizer)
    other = build(1)
    fresh = make(other.parameters(), lr=1.0)
    checkpoint.load(other, fresh)
    assert same(optimizer.state_dict(), fresh.state_dict())


def grouped(model, *, turned=False):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]
    return torch.optim.AdamW(groups[::-1] if turned else groups, lr=0.01)


def test_state_follows_the_parameters_name_not_its_place(checkpoint):
    model = build()
    optimizer = grouped(model)
    train(model, optimizer)
    checkpoint.save(model, optimizer)
    other = build(1)
    turned = grouped(other, turned=True)
    checkpoint.load(other, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.5, 0.01]
    expected = dict(zip(map(id, model.parameters()), model.named_parameters(), strict=True))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert same(optimizer.state[mine], turned.state[theirs]), expected[id(mine)][0]


def test_groups_that_were_mixed_up_are_refused(checkpoint):
    model = build()
    optimizer = grouped(model)
    train(model, optimizer)
    checkpoint.save(model, optimizer)
    other = build()
    with pytest.raises(CheckpointError, match="mixes parameters of 2 saved groups"):
        checkpoint.load(other, torch.optim.AdamW(other.parameters()))
