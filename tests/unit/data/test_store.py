import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.data import DatasetInfo, IntervalSet, SampleSchema, ShardStore
from tensorforge.data.segments.segment import BLOCK, HEADER, Segment, segment_name
from tensorforge.errors import (
    ClosedError,
    ConflictError,
    EncodingError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    TransferCancelledError,
)

ARRAYS = DatasetInfo(size=1000, schema=SampleSchema(dtype="<i4", shape=(3,)))
RECORDS = DatasetInfo(size=1000, schema=SampleSchema())


def array(start, stop):
    return np.arange(start * 3, stop * 3, dtype="<i4").reshape(-1, 3)


def records(start, stop):
    return [b"%d" % index * (index % 7) for index in range(start, stop)]


@pytest.fixture
def store(tmp_path):
    with ShardStore(tmp_path / "store", ARRAYS) as store:
        yield store


@pytest.fixture
def record_store(tmp_path):
    with ShardStore(tmp_path / "records", RECORDS) as store:
        yield store


def test_what_is_put_can_be_read_sample_by_sample(store):
    store.put(10, 20, array(10, 20))
    assert store[12].tolist() == [36, 37, 38]
    assert [x.tolist() for x in store.__getitems__([10, 19])] == [[30, 31, 32], [57, 58, 59]]
    assert store.held == IntervalSet(((10, 20),))
    assert len(store) == 1000
    store[12][0] = 7  # a copy of its own, so the store does not change
    assert store[12].tolist() == [36, 37, 38]


def test_records_have_any_length(record_store):
    record_store.put(5, 50, records(5, 50))
    assert [record_store[i] for i in range(5, 50)] == records(5, 50)


def test_a_sample_that_is_not_held_is_said_to_be_missing(store):
    store.put(0, 10, array(0, 10))
    with pytest.raises(NotFoundError, match="sample 10 is not held"):
        store[10]
    with pytest.raises(IndexError, match="sample 1000"):
        store[1000]
    with pytest.raises(NotFoundError, match="does not hold 10-12"):
        store.open_range(5, 12)


def test_a_store_is_found_again_with_everything_in_it(tmp_path):
    with ShardStore(tmp_path, ARRAYS) as store:
        store.put(3, 9, array(3, 9))
    with ShardStore(tmp_path) as again:
        assert (again.info, again.held) == (ARRAYS, IntervalSet(((3, 9),)))
        again.verify()


def test_another_data_set_is_not_mixed_in(tmp_path):
    ShardStore(tmp_path, ARRAYS).close()
    with pytest.raises(ConflictError, match="holds another data set"):
        ShardStore(tmp_path, RECORDS)
    with pytest.raises(NotFoundError, match="not a shard store"):
        ShardStore(tmp_path / "elsewhere")
    (tmp_path / "schema.json").write_text("{}")
    with pytest.raises(EncodingError, match="does not describe a data set"):
        ShardStore(tmp_path)


def test_a_closed_store_is_not_used(store):
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.refresh()


def test_only_segments_of_which_nothing_is_kept_are_released(store):
    for start in (0, 10, 20):
        store.put(start, start + 10, array(start, start + 10))
    assert store.release(IntervalSet(((12, 15),))) == IntervalSet(((0, 10), (20, 30)))
    assert store.held == IntervalSet(((10, 20),))


def test_a_damaged_byte_is_found_before_it_is_given_out(store):
    store.put(0, 10, array(0, 10))
    path = store.folder / "segments" / segment_name(0, 10)
    content = bytearray(path.read_bytes())
    content[HEADER.size + 40] ^= 1
    path.write_bytes(content)
    with ShardStore(store.folder) as again:
        with pytest.raises(IntegrityError, match="block 0 is damaged"):
            again[1]
        with pytest.raises(IntegrityError):
            again.verify()


@pytest.mark.parametrize("damage", ["short", "header", "magic", "table", "empty"])
def test_a_file_that_is_no_segment_is_refused(store, damage):
    store.put(0, 10, array(0, 10))
    path = store.folder / "segments" / segment_name(0, 10)
    content = bytearray(path.read_bytes())
    if damage == "short":
        content = content[:-3]
    elif damage == "empty":
        content = bytearray()
    else:
        content[{"header": 12, "magic": 0, "table": -6}[damage]] ^= 1
    path.write_bytes(content)
    with pytest.raises((EncodingError, IntegrityError)):
        ShardStore(store.folder)


def collect(stream):
    return b"".join(bytes(stream.block(number)) for number in range(stream.blocks))


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


def big(store, blocks=3, extra=1000):
    """A range of a few blocks and a bit: its samples as one body."""
    body = np.random.default_rng(1).bytes(blocks * BLOCK + extra)
    return body[: len(body) - len(body) % 12]


@pytest.fixture
def big_store(tmp_path):
    info = DatasetInfo(size=10**6, schema=ARRAYS.schema)
    with ShardStore(tmp_path / "big", info) as store:
        yield store


def test_an_interrupted_range_goes_on_after_its_last_whole_block(big_store):
    body = big(big_store)
    count = len(body) // 12
    with big_store.receive(0, count) as part:
        part.begin(len(body))
        part.append(body[:BLOCK])
        part.append(body[BLOCK : 2 * BLOCK])
        expected = part.prefix_checksum
    path = next((big_store.folder / "incoming").iterdir())
    with path.open("ab") as file:
        file.write(b"torn")  # the writer died in the middle of a block
    with big_store.receive(0, count) as part:
        part.begin(len(body))
        assert (part.verified_bytes, part.prefix_checksum) == (2 * BLOCK, expected)
        with pytest.raises(ConflictError, match="bytes are here"):
            part.commit()
        part.append(body[2 * BLOCK : 3 * BLOCK])
        part.append(body[3 * BLOCK :])
        part.commit()
    assert collect(big_store.open_range(0, count)) == body
    assert list((big_store.folder / "incoming").iterdir()) == []


def test_a_range_of_another_size_starts_from_nothing(big_store):
    with big_store.receive(0, 10**5) as part:
        part.begin(2 * BLOCK)
        part.append(bytes(BLOCK))
    with big_store.receive(0, 10**5) as part:
        assert part.verified_bytes == BLOCK
        part.begin(3 * BLOCK)
        assert part.verified_bytes == 0


def test_whoever_receives_a_range_anew_shuts_the_earlier_one_out(big_store):
    with big_store.receive(0, 10**5) as late:
        late.begin(2 * BLOCK)
        late.append(bytes(BLOCK))
        with big_store.receive(0, 10**5) as part:
            part.begin(2 * BLOCK)
            assert part.verified_bytes == BLOCK
            for attempt in (lambda: late.append(bytes(BLOCK)), late.restart, late.discard):
                with pytest.raises(TransferCancelledError, match="took over"):
                    attempt()
            part.append(bytes(BLOCK))
            assert part.is_complete


def test_blocks_come_in_their_size(big_store):
    with big_store.receive(0, 10**5) as part:
        part.begin(2 * BLOCK)
        with pytest.raises(InvalidInputError, match=f"10 bytes came, expected {BLOCK}"):
            part.append(bytes(10))
        part.discard()


@pytest.mark.parametrize(
    ("start", "stop", "samples", "message"),
    [
        (0, 10, array(0, 9), r"shape \(9, 3\) came, expected \(10, 3\)"),
        (990, 1001, array(990, 1001), r"\[990, 1001\) is no range"),
        (5, 5, array(5, 5), r"\[5, 5\) is no range"),
    ],
)
def test_wrong_samples_are_refused(store, start, stop, samples, message):
    with pytest.raises(InvalidInputError, match=message):
        store.put(start, stop, samples)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": ">i4"}, {"dtype": "<U4"}, {"shape": (3,)}, {"dtype": "<i4", "shape": (-1,)}],
)
def test_a_schema_is_checked(fields):
    with pytest.raises(InvalidInputError):
        SampleSchema(**fields)


def reader(content):
    return lambda offset, length: memoryview(content)[offset : offset + length]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_segment(data):
    for content in (data, b"TFSEG\x00\x00\x01" + data):
        with pytest.raises((EncodingError, IntegrityError)):
            Segment("x", SampleSchema(), reader(content), len(content))


def test_lengths_that_do_not_add_up_are_refused(record_store):
    record_store.put(0, 3, [b"a", b"bb", b"ccc"])
    path = record_store.folder / "segments" / segment_name(0, 3)
    with pytest.raises(EncodingError, match="do not make"):
        content = path.read_bytes()
        Segment("x", ARRAYS.schema, reader(content), len(content))


def test_the_schema_is_plain_json(store):
    found = json.loads((store.folder / "schema.json").read_text())
    assert found["data"] == {"size": 1000, "schema": {"dtype": "<i4", "shape": [3]}}
