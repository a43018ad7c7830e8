"""The simulated accelerator is late, has memory and random numbers of its own, and counts who waits for it."""

from __future__ import annotations

import copy
import io
import os
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("device_process")

SCHEDULES = ["on demand", "side streams first", "default stream first", "jittered"]


def sim():
    return torch.get_device_module("sim")


def test_the_device_is_what_torch_calls_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == sim().device_count() == 2
    assert torch.ones(1, device="sim").is_sim
    assert torch.nn.Linear(1, 1).sim().weight.device == torch.device("sim", 0)


def test_devices_are_apart_and_have_an_index():
    first = torch.arange(4.0, device="sim:0")
    second = (first * 2).to("sim:1")
    assert (first.device.index, second.device.index) == (0, 1)
    assert (second + 1).tolist() == [1, 3, 5, 7]
    with sim().device(1):
        assert torch.ones(1, device="sim").device.index == 1
    with pytest.raises(RuntimeError, match="same device"):
        first + second
    with pytest.raises(RuntimeError, match="2 simulated devices are visible"):
        torch.ones(1, device="sim:2")


def test_tensors_of_the_host_do_not_mix_with_the_device():
    there = torch.ones(3, device="sim")
    for attempt in (
        lambda: there + torch.ones(3),
        lambda: there.lerp_(torch.ones(3), 0.5),
        lambda: torch.nn.functional.linear(there, torch.ones(3, 3)),
        lambda: torch.ones(()).add_(there.sum()),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            attempt()
    assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number is no tensor of the host
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def test_a_stream_is_late_until_somebody_waits():
    number = torch.zeros(3, device="sim")
    sim().synchronize()
    number.add_(5)
    assert sim().peek(number).tolist() == [0, 0, 0]
    sim().synchronize()
    assert sim().peek(number).tolist() == [5, 5, 5]


def test_a_stream_that_is_polled_gets_there():
    event = sim().Event()
    number = torch.zeros(3, device="sim").add_(1)
    event.record()
    while not event.query():
        pass
    assert sim().peek(number).tolist() == [1, 1, 1]
    assert sim().synchronizations() == {}


def test_events_tell_the_time_between_them():
    before, after = sim().Event(enable_timing=True), sim().Event(enable_timing=True)
    before.record()
    torch.ones(3, device="sim")
    after.record()
    after.synchronize()
    assert before.elapsed_time(after) >= 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stream_that_waits_for_another_sees_its_work(schedule):
    sim().set_schedule(schedule, seed=1)
    side = sim().Stream()
    for wait in ("stream", "event"):
        number = torch.zeros(1000, device="sim").add_(1)
        if wait == "stream":
            side.wait_stream(sim().current_stream())
        else:
            side.wait_event(sim().current_stream().record_event())
        with sim().stream(side):
            seen = number.clone()
        number.record_stream(side)
        side.synchronize()
        assert torch.equal(sim().peek(seen), torch.ones(1000))


@pytest.mark.parametrize("schedule", ["on demand", "side streams first"])
def test_a_stream_that_does_not_wait_sees_old_numbers(schedule):
    number = torch.zeros(1000, device="sim")
    sim().synchronize()
    sim().set_schedule(schedule)
    number.add_(1)
    with sim().Stream() as side:
        seen = number.clone()
    side.synchronize()
    assert torch.equal(sim().peek(seen), torch.zeros(1000))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="there is no schedule 'never'"):
        sim().set_schedule("never")


def test_memory_that_nobody_wrote_is_not_a_number():
    assert torch.empty(8, device="sim").isnan().all()
    assert torch.empty(8, device="sim", dtype=torch.bfloat16).isnan().all()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("schedule", ["on demand", "default stream first"])
def test_memory_that_a_stream_still_reads_is_kept_only_if_that_was_recorded(schedule, recorded):
    sim().set_schedule(schedule)
    side = sim().Stream()
    number = torch.full((1000,), 7.0, device="sim")
    side.wait_stream(sim().current_stream())
    with side:
        seen = number * 1
    if recorded:
        number.record_stream(side)
    del number
    torch.zeros(1000, device="sim").tolist()  # takes the memory that is free now
    side.synchronize()
    assert torch.equal(sim().peek(seen), torch.full((1000,), 7.0)) == recorded


def test_memory_is_counted_and_used_again():
    assert sim().memory_allocated() == 0
    sim().reset_peak_memory_stats()
    first = torch.zeros(1 << 18, device="sim")
    address = first.data_ptr()
    assert sim().memory_allocated() == 1 << 20
    del first
    assert sim().memory_allocated() == 0
    assert sim().max_memory_allocated() == 1 << 20
    second = torch.zeros(1 << 18, device="sim")
    assert second.data_ptr() == address
    del second
    reserved = sim().memory_reserved()
    sim().empty_cache()
    assert sim().memory_reserved() <= reserved - (1 << 20)
    assert torch.ones(1 << 18, device="sim").sum().item() == 1 << 18


def test_reading_a_value_waits_and_is_counted():
    number = torch.arange(3.0, device="sim")
    number.add_(1).mul_(2).sqrt_()
    torch._foreach_add_([number, number], 1.0)
    assert sim().synchronizations() == {}
    number.sum().item()
    number.cpu()
    torch.zeros(3).copy_(number, non_blocking=True)  # this host memory is not pinned
    torch.ones(3).to("sim", non_blocking=True)
    torch.nonzero(number)
    number[number > 2]
    torch.equal(number, number)
    sim().synchronize()
    sim().current_stream().synchronize()
    assert sim().synchronizations() == {
        "item": 1,
        "copy to host": 2,
        "copy from host": 1,
        "aten::nonzero": 2,
        "aten::equal": 1,
        "device.synchronize": 1,
        "stream.synchronize": 1,
    }
    sim().reset_synchronizations()
    assert sim().synchronizations() == {}


def test_waiting_can_be_forbidden():
    number = torch.ones(3, device="sim")
    with sim().no_synchronization():
        number.add_(1)
        with pytest.raises(RuntimeError, match=r"waits for the device \(item\)"):
            number.sum().item()
    assert number.tolist() == [2, 2, 2]


def test_copies_with_pinned_memory_are_late():
    source = torch.arange(4.0).pin_memory()
    target = torch.zeros(4, pin_memory=True)
    assert source.is_pinned()
    assert source[1:].is_pinned()
    assert not torch.ones(4).is_pinned()
    with sim().no_synchronization():
        there = source.to("sim", non_blocking=True)
        target.copy_(there * 2, non_blocking=True)
        assert target.tolist() == [0, 0, 0, 0]
        source.add_(10)  # too early: the copy has not begun
    sim().synchronize()
    assert target.tolist() == [20, 22, 24, 26]


def test_pinned_memory_outlives_its_tensor_while_a_copy_is_under_way():
    source = torch.full((1 << 16,), 3.0).pin_memory()
    there = source.to("sim", non_blocking=True)
    del source
    torch.full((1 << 16,), 4.0).pin_memory()
    assert there.mean().item() == 3


def test_a_loader_pins_its_batches():
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    assert [batch.is_pinned() for (batch,) in loader] == [True, True]


def test_an_error_in_late_work_is_told_to_whoever_waits():
    table = torch.nn.Embedding(4, 2).to("sim")
    row = table(torch.tensor([9], device="sim"))
    with pytest.raises(
        RuntimeError,
        match="failed on stream 0 on device sim:0 after it was enqueued: index out of range",
    ):
        row.tolist()
    with pytest.raises(RuntimeError, match="size of tensor"):  # shapes are checked at once
        torch.ones(3, device="sim").add_(torch.ones(4, device="sim"))


def test_a_generator_draws_what_the_cpu_draws_from_the_same_seed():
    torch.manual_seed(5)
    drawn = [torch.randn(100, device=f"sim:{index}") for index in range(2)]
    torch.manual_seed(5)
    expected = torch.randn(100)
    assert all(torch.equal(numbers.cpu(), expected) for numbers in drawn)
    for draw in (
        lambda device, generator: torch.randperm(50, device=device, generator=generator),
        lambda device, generator: torch.empty(9, device=device).exponential_(generator=generator),
        lambda device, generator: torch.full((9,), 0.5, device=device).bernoulli(
            generator=generator
        ),
        lambda device, generator: torch.ones(9, device=device).multinomial(4, generator=generator),
        lambda device, generator: torch.randint(9, (7,), device=device, generator=generator),
    ):
        there = draw("sim", torch.Generator("sim").manual_seed(8))
        here = draw("cpu", torch.Generator().manual_seed(8))
        assert torch.equal(there.cpu(), here)


def test_random_streams_are_saved_restored_and_forked_without_waiting():
    with sim().no_synchronization():
        torch.rand(3, device="sim")
        state = sim().get_rng_state("sim")
        first = torch.rand(3, device="sim")
        sim().set_rng_state(state, "sim")
        with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
            torch.rand(50, device="sim")
        again = torch.rand(3, device="sim")
    assert torch.equal(first.cpu(), again.cpu())
    other = torch.Generator("sim")
    other.set_state(state)
    assert torch.equal(torch.rand(3, device="sim", generator=other).cpu(), first.cpu())


def test_the_host_and_the_device_have_random_streams_of_their_own():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    torch.nn.functional.dropout(torch.ones(100, device="sim"), 0.5)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(NotImplementedError, match="unnamed generator"):
        torch.native_dropout(torch.ones(3, device="sim"), 0.5, train=True)


def test_recomputed_activations_see_the_same_dropout():
    number = torch.ones(100, device="sim", requires_grad=True)
    dropped = checkpoint(torch.nn.functional.dropout, number, 0.5, use_reentrant=False)
    dropped.sum().backward()
    assert torch.equal((number.grad != 0).cpu(), (dropped != 0).cpu())


def test_state_is_saved_and_loaded():
    model = torch.nn.Linear(3, 2).to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, device="sim")).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    there = torch.load(file)
    file.seek(0)
    here = torch.load(file, map_location="cpu")
    assert there[0]["weight"].device == torch.device("sim", 0)
    assert torch.equal(there[0]["weight"].cpu(), here[0]["weight"])
    optimizer.load_state_dict(here[1])
    assert optimizer.state_dict()["state"][0]["exp_avg"].device == torch.device("sim", 0)
    assert torch.equal(copy.deepcopy(model).weight.cpu(), here[0]["weight"])


def test_parameters_may_be_views_of_flat_memory():
    flat = torch.zeros(10, device="sim")
    parameter = torch.nn.Parameter(flat[2:6].view(2, 2))
    parameter.grad = flat[6:10].view(2, 2)
    (parameter * 3).sum().backward()
    with torch.no_grad():
        parameter.fill_(1)
    assert flat.tolist() == [0, 0, 1, 1, 1, 1, 3, 3, 3, 3]
    assert torch._utils._flatten_dense_tensors([flat, flat]).shape == (20,)


def test_storages_change_their_size():
    number = torch.arange(6.0, device="sim")
    number.resize_(8)
    assert number[:6].tolist() == [0, 1, 2, 3, 4, 5]
    storage = number.untyped_storage()
    storage.resize_(0)
    storage.resize_(80)
    view = torch.empty(0, device="sim").set_(storage, 0, (4, 5), (5, 1))
    assert view.fill_(2).sum().item() == 40


def test_threads_share_a_device():
    numbers = torch.zeros(4, device="sim")

    def add(index):
        with sim().Stream() as stream:
            for _ in range(50):
                numbers[index].add_(1)
        stream.synchronize()

    sim().synchronize()
    threads = [threading.Thread(target=add, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers.tolist() == [50, 50, 50, 50]


def test_a_forked_process_cannot_touch_the_device():
    number = torch.ones(3, device="sim")
    sim().synchronize()
    child = os.fork()
    if child == 0:
        os._exit(_status_of_a_fork(number))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sim().peek(number).tolist() == [1, 1, 1]  # what the other process freed is still ours


def _status_of_a_fork(number):
    try:
        torch.manual_seed(3)
        torch.ones(3, device="sim")
    except RuntimeError as error:
        del number
        return 0 if "forked process" in str(error) and sim()._is_in_bad_fork() else 2
    return 3
