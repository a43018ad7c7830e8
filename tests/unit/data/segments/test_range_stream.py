import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.segments.making import ARRAYS, RECORDS, array, collect, records

from tensorforge.data import ShardStore
from tensorforge.data.segments.segment import BLOCK


@given(
    cuts=st.lists(st.integers(0, 60), max_size=5),
    ends=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    as_records=st.booleans(),
)
def test_any_range_can_be_cut_out_of_any_segments(tmp_path_factory, cuts, ends, as_records):
    info, make = (RECORDS, records) if as_records else (ARRAYS, array)
    folder = tmp_path_factory.mktemp("cut")
    with ShardStore(folder / "a", info) as source, ShardStore(folder / "b", info) as target:
        edges = sorted({0, 60, *cuts})
        for start, stop in itertools.pairwise(edges):
            source.put(start, stop, make(start, stop))
        start, stop = sorted(ends)
        stream = source.open_range(start, stop)
        body = collect(stream)
        assert len(body) == stream.body_bytes
        if start == stop:
            return
        with target.receive(start, stop) as part:
            part.begin(len(body))
            for offset in range(0, len(body), BLOCK):
                part.append(body[offset : offset + BLOCK])
            part.commit()
        for index in range(start, stop):
            assert np.array_equal(target[index], source[index])
