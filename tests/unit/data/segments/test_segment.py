import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.segments.making import ARRAYS, array, reader

from tensorforge.data import SampleSchema, ShardStore
from tensorforge.data.segments.segment import HEADER, Segment, segment_name
from tensorforge.errors import (
    EncodingError,
    IntegrityError,
)


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
