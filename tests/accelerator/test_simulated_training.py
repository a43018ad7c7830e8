"""Training on the simulated accelerator gives the CPU's bits, late, and notices each wait that is missing."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytestmark = pytest.mark.usefixtures("device_process")

WORDS = 30


def sim():
    return torch.get_device_module("sim")


def make(kind):
    """A model of this kind and batches for it, on the CPU."""
    from examples.char_transformer import CONTEXT, CharacterTransformer
    from tests.integration.train_cases import MODELS, data

    torch.manual_seed(3)
    if kind == "example":
        codes = torch.randint(0, WORDS, (48, CONTEXT + 1))
        inputs, targets = codes[:, :-1], codes[:, 1:]
        model = CharacterTransformer(WORDS)
    else:
        inputs, targets = (values[:48] for values in data(kind, 48).tensors)
        model = MODELS[kind]()
    return model, list(zip(inputs.split(12), targets.split(12), strict=True))


def optimizer_for(model, settings):
    settings = dict(settings)
    if settings.pop("sgd", False):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **settings)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, **settings)


def loss_of(kind, model, x, y):
    logits = model(x)
    return F.cross_entropy(logits.transpose(1, 2) if kind == "example" else logits, y)


def train(kind, device, *, dtype=torch.float32, autocast=False, **settings):
    """Train a few steps with clipping and a moving average; the final state, on the CPU."""
    model, batches = make(kind)
    model = model.to(device, dtype)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = optimizer_for(model, settings)
    torch.manual_seed(4)
    losses = []
    for x, y in batches:
        x, y = x.to(device), y.to(device)
        x = x.to(dtype) if x.is_floating_point() else x
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            loss = loss_of(kind, model, x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.detach())
    state = {"losses": torch.stack(losses).cpu()}
    for name, module in (("model", model), ("average", average)):
        state |= {f"{name}.{key}": value.cpu() for key, value in module.state_dict().items()}
    return state


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"foreach": False},
        {"fused": True},
        {"sgd": True},
        {"dtype": torch.bfloat16},
        {"autocast": True},
    ],
    ids=["adamw", "single", "fused", "sgd", "bf16", "autocast"],
)
@pytest.mark.parametrize("kind", ["mlp", "convnet", "transformer", "example"])
def test_the_bits_are_those_of_the_cpu(kind, settings):
    assert_equal(train(kind, "sim:1", **settings), train(kind, "cpu", **settings))


@pytest.mark.parametrize("schedule", ["side streams first", "default stream first", "jittered"])
def test_the_bits_do_not_depend_on_when_streams_work(schedule):
    expected = train("example", "sim")
    sim().set_schedule(schedule)
    assert_equal(train("example", "sim"), expected)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert all(torch.isfinite(value.float()).all() for value in expected.values())


def test_a_step_waits_for_nothing_until_its_loss_is_read():
    model, batches = make("example")
    model = model.to("sim")
    optimizer = optimizer_for(model, {})
    batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
    sim().reset_synchronizations()
    before = sim().peek(model.head[1].weight)
    for x, y in batches:
        with sim().no_synchronization():
            optimizer.zero_grad()
            x, y = x.to("sim", non_blocking=True), y.to("sim", non_blocking=True)
            loss = loss_of("example", model, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert torch.equal(sim().peek(model.head[1].weight), before)
        loss.item()
        after = sim().peek(model.head[1].weight)
        assert not torch.equal(after, before)
        before = after
    assert sim().synchronizations() == {"item": len(batches)}


def exchanged(schedule, missing=None):
    """A weight after its gradient went through pinned memory, on a stream of its own, and came back doubled."""
    weight = torch.ones(5000, device="sim", requires_grad=True)
    exchange, compute = sim().Stream(), sim().current_stream()
    staged = torch.zeros(5000, pin_memory=True)
    sim().synchronize()
    sim().set_schedule(schedule)
    (weight * torch.full((5000,), 3.0, device="sim")).sum().backward()
    gradient, weight.grad = weight.grad * 1, None
    if missing != "the exchange's wait for the gradient":
        exchange.wait_event(compute.record_event())
    with sim().stream(exchange):
        staged.copy_(gradient, non_blocking=True)
        done = exchange.record_event()
    if missing != "the record of the exchange's use":
        gradient.record_stream(exchange)
    del gradient
    torch.zeros(
        5000, device="sim"
    ).sum().item()  # takes memory that is free, and waits for the default stream
    if missing != "the host's wait for the staged gradient":
        done.synchronize()
    total = (staged * 2).pin_memory()
    with sim().stream(exchange):
        total = total.to("sim", non_blocking=True)
    total.record_stream(compute)
    if missing != "the update's wait for the sum":
        compute.wait_stream(exchange)
    with torch.no_grad():
        weight -= total
    result = weight.detach().cpu()
    sim().synchronize()
    return result


@pytest.mark.parametrize(
    "schedule", ["on demand", "side streams first", "default stream first", "jittered"]
)
def test_an_exchange_that_waits_is_right_under_every_schedule(schedule):
    assert torch.equal(exchanged(schedule), torch.full((5000,), -5.0))


@pytest.mark.parametrize(
    ("missing", "schedule"),
    [
        ("the exchange's wait for the gradient", "side streams first"),
        ("the record of the exchange's use", "default stream first"),
        ("the host's wait for the staged gradient", "default stream first"),
        ("the update's wait for the sum", "default stream first"),
    ],
)
def test_an_exchange_that_misses_a_wait_is_wrong(missing, schedule):
    assert not torch.equal(exchanged(schedule, missing), torch.full((5000,), -5.0))
