import pytest

from tensorforge.memory import GpuDevice, MemoryPool


@pytest.fixture
def pool():
    return MemoryPool(GpuDevice("gpu-0", 1000, 1500, (8, 6)))
