import pytest

from tensorforge.errors import ConfigurationError
from tensorforge.launch.device_slots import DeviceSlots


def test_without_devices_a_worker_gets_no_variables():
    assert DeviceSlots(0, {"CUDA_VISIBLE_DEVICES": "3"}).take("a") == {}


def test_each_worker_gets_its_own_devices_and_a_new_one_those_of_the_lost_one():
    slots = DeviceSlots(2, {})
    found = [slots.take(worker)["CUDA_VISIBLE_DEVICES"] for worker in "abc"]
    assert found == ["0,1", "2,3", "4,5"]
    slots.release("b")
    assert slots.take("d") == {"CUDA_VISIBLE_DEVICES": "2,3", "LOCAL_RANK": "0"}
    assert slots.take("e")["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_only_devices_that_the_launcher_sees_are_given():
    slots = DeviceSlots(1, {"CUDA_VISIBLE_DEVICES": "4,GPU-77"})
    assert [slots.take(worker)["CUDA_VISIBLE_DEVICES"] for worker in "abc"] == ["4", "GPU-77", ""]


def test_more_workers_than_devices_are_refused():
    slots = DeviceSlots(2, {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    slots.require(1)
    with pytest.raises(ConfigurationError, match="needs 4 devices for 2 workers"):
        slots.require(2)
