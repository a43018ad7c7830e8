"""Every value that travels or is journaled survives the journey unchanged."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic import (
    AdaptationStrategy,
    ClusterTopology,
    ElasticTrainingConfig,
    GlobalTrainingState,
    RedistributionType,
    RescalingEvent,
    WorkerId,
    WorkerMetadata,
    WorkerStatus,
)
from tensorforge.encoding import decode, encode
from tensorforge.errors import EncodingError
from tensorforge.security import TokenRecord

names = st.text(min_size=1, max_size=12)
times = st.datetimes(timezones=st.just(UTC))
plain_names = st.text("abcXYZ019-_.é中", min_size=1, max_size=12)
worker_ids = st.builds(WorkerId, plain_names, plain_names, st.integers(0, 65_535))
topologies = st.builds(
    ClusterTopology,
    workers=st.lists(worker_ids, unique_by=lambda w: w.id, max_size=5).map(tuple),
    epoch=st.integers(0, 2**63),
    last_updated=times,
)
metadata = st.builds(
    WorkerMetadata,
    worker_id=worker_ids,
    status=st.sampled_from(WorkerStatus),
    join_time=times,
    last_heartbeat=times,
    rank=st.integers(-1, 1000),
    local_world_size=st.integers(1, 8),
    custom_attributes=st.dictionaries(names, st.text()),
)
states = st.builds(
    GlobalTrainingState,
    current_epoch=st.integers(0, 10**6),
    current_step=st.integers(0, 10**12),
    learning_rate=st.floats(0, 1e6),
    global_batch_size=st.integers(0, 10**6),
    active_worker_count=st.integers(0, 1000),
    state_timestamp=times,
    optimizer_state=st.none() | st.binary(max_size=64),
)
configs = st.builds(
    ElasticTrainingConfig,
    min_workers=st.integers(1, 5),
    max_workers=st.none() | st.integers(5, 50),
    lr_adaptation_strategy=st.sampled_from(AdaptationStrategy),
    redistribution_type=st.sampled_from(RedistributionType),
    use_synchronous_rescaling=st.booleans(),
)
tokens = st.builds(
    TokenRecord,
    token_id=names,
    name=names,
    secret_hash=names,
    scopes=st.lists(names).map(tuple),
    created_at=times,
    expires_at=st.none() | times,
    revoked_at=st.none() | times,
)


@st.composite
def events(draw):
    old = draw(topologies)
    members = draw(st.lists(worker_ids, unique_by=lambda w: w.id, max_size=5))
    new = old.succeed(members, at=draw(times))
    return RescalingEvent.between(old, new, draw(st.text()), at=draw(times))


@given(st.one_of(worker_ids, topologies, metadata, states, configs, tokens, events()))
def test_every_type_survives_a_round_trip_through_json_text(value):
    text = json.dumps(encode(value), allow_nan=False)
    assert decode(json.loads(text), type(value)) == value


@dataclass(frozen=True)
class Everything:
    number: float
    pair: tuple[int, str]
    by_worker: Mapping[WorkerId, tuple[int, ...]]
    by_number: Mapping[int, bool]
    maybe: bytes | None = None


everything = st.builds(
    Everything,
    number=st.floats(),
    pair=st.tuples(st.integers(), st.text()),
    by_worker=st.dictionaries(worker_ids, st.lists(st.integers()).map(tuple), max_size=3),
    by_number=st.dictionaries(st.integers(), st.booleans(), max_size=3),
    maybe=st.none() | st.binary(),
)


@given(everything)
def test_every_kind_of_field_survives(value):
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)), Everything)
    if math.isnan(value.number):
        assert math.isnan(back.number)
        back = Everything(value.number, back.pair, back.by_worker, back.by_number, back.maybe)
    assert back == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(json_values, st.sampled_from(["type", "version", "data", "epoch", "workers", "extra"]))
def test_no_damage_ends_in_anything_but_an_encoding_error(junk, place):
    payload = encode(ClusterTopology(workers=(WorkerId("a", "h", 1),)))
    target = payload if place in payload else payload["data"]
    target[place] = junk
    try:
        assert isinstance(decode(payload, ClusterTopology), ClusterTopology)
    except EncodingError as error:
        assert str(error)


def damaged(**changes):
    payload = encode(WorkerId("a", "h", 1))
    return payload | changes


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (None, "expected an encoded WorkerId"),
        ({}, "expected an encoded WorkerId"),
        (damaged(type="Other"), "found 'Other'"),
        (damaged(version=2), "version 2 is newer than 1"),
        (damaged(version=0), "not a positive whole number"),
        (damaged(version=True), "not a positive whole number"),
        (damaged(data={"id": "a", "hostname": "h"}), "lacks port"),
        (damaged(data={"id": "a", "hostname": "h", "port": 1, "x": 1}), "has no field x"),
        (
            damaged(data={"id": "a", "hostname": "h", "port": True}),
            r"WorkerId\.port: expected a whole",
        ),
        (damaged(data={"id": 5, "hostname": "h", "port": 1}), r"WorkerId\.id: expected a string"),
        (damaged(data={"id": "a", "hostname": "h", "port": -5}), "port = -5: must be at least 0"),
        (damaged(data=[]), "expected an object"),
    ],
)
def test_a_wrong_payload_is_refused_with_the_place(payload, complaint):
    with pytest.raises(EncodingError, match=complaint):
        decode(payload, WorkerId)


def test_times_are_kept_in_utc_and_naive_ones_refused():
    east = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    payload = encode(ClusterTopology(last_updated=east))
    assert payload["data"]["last_updated"] == "2026-01-01T10:00:00+00:00"
    assert decode(payload, ClusterTopology).last_updated == east
    with pytest.raises(EncodingError, match="no time zone"):
        encode(ClusterTopology(last_updated=datetime(2026, 1, 1)))  # noqa: DTZ001
    payload["data"]["last_updated"] = "2026-01-01T10:00:00"
    with pytest.raises(EncodingError, match="no time zone"):
        decode(payload, ClusterTopology)


def test_what_has_no_encoding_is_refused():
    with pytest.raises(EncodingError, match="not a dataclass"):
        encode({"a": 1})

    @dataclass
    class Odd:
        value: object

    with pytest.raises(EncodingError, match=r"Odd\.value: a set has no encoding"):
        encode(Odd({1}))
