import json

import pytest

from tensorforge.data import SampleSchema
from tensorforge.errors import (
    InvalidInputError,
)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": ">i4"}, {"dtype": "<U4"}, {"shape": (3,)}, {"dtype": "<i4", "shape": (-1,)}],
)
def test_a_schema_is_checked(fields):
    with pytest.raises(InvalidInputError):
        SampleSchema(**fields)


def test_the_schema_is_plain_json(store):
    found = json.loads((store.folder / "schema.json").read_text())
    assert found["data"] == {"size": 1000, "schema": {"dtype": "<i4", "shape": [3]}}
