import pytest
import torch
from torch import nn

from tensorforge.errors import ConflictError, InvalidInputError
from tensorforge.train import LossScaling, Run, RunConfig

SAMPLES = [(torch.zeros(3), 0)] * 24


def make_run(model, **options):
    parameters = [p for p in model.parameters() if p.device.type != "meta"] or [
        nn.Parameter(torch.zeros(1))
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return Run(model, optimizer, SAMPLES, RunConfig(batch_size=12, **options))


def test_a_wrapped_model_is_refused_by_name():
    model = nn.Sequential(nn.DataParallel(nn.Linear(3, 2)))
    with pytest.raises(
        InvalidInputError, match=r"model\.0 is wrapped in DataParallel: pass the module inside"
    ):
        make_run(model)


def test_parameters_without_values_are_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"0\.weight, 0\.bias are on the meta device"):
        make_run(nn.Sequential(nn.Linear(3, 2, device="meta")))


def test_an_optimizer_step_of_the_script_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Run(model, optimizer, SAMPLES, RunConfig(batch_size=12)) as run:
        for step in run.steps(total=1):
            for x, y in step.batches():
                step.backward(nn.functional.cross_entropy(model(x), y))
            with pytest.raises(
                ConflictError, match=r"outside of the commit.*loss_scaling=LossScaling"
            ):
                optimizer.step()
            step.commit()


@pytest.mark.parametrize(
    "wrong", [{"initial": 0}, {"growth": 0.5}, {"backoff": 1.0}, {"growth_interval": 0}]
)
def test_a_wrong_loss_scaling_is_named(wrong):
    (field,) = wrong
    with pytest.raises(InvalidInputError, match=field):
        LossScaling(**wrong)


def test_the_scale_shrinks_after_an_overflow_and_grows_after_applied_steps():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = LossScaling(initial=8.0, growth_interval=2)
    seen, before = [], []
    with Run(
        model,
        optimizer,
        SAMPLES,
        RunConfig(batch_size=12, loss_scaling=scaling),
        before_update=lambda: before.append(model.weight.grad.abs().max().item()),
        after_update=lambda: seen.append("update"),
        on_commit=lambda step: seen.append((step.step, step.is_skipped)),
    ) as run:
        scales = []
        for step in run.steps(total=4):
            scales.append(run.state.loss_scale.value)
            for x, y in step.batches():
                loss = nn.functional.cross_entropy(model(x + 1), y)
                step.backward(loss * float("nan") if step.number == 1 else loss)
            step.commit()
    assert scales == [8.0, 8.0, 4.0, 4.0]
    assert run.state.loss_scale.value == 8.0
    assert seen == ["update", (0, False), (1, True), "update", (2, False), "update", (3, False)]
    assert all(gradient < 2 for gradient in before), "the gradient is unscaled before it is used"
