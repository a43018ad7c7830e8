import pytest
from tests.unit.data.segments.making import ARRAYS, RECORDS

from tensorforge.data import ShardStore


@pytest.fixture
def store(tmp_path):
    with ShardStore(tmp_path / "store", ARRAYS) as store:
        yield store


@pytest.fixture
def record_store(tmp_path):
    with ShardStore(tmp_path / "records", RECORDS) as store:
        yield store
