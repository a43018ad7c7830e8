"""Whatever the trace, every policy places blocks that are alive together apart from each other."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorforge.errors import TensorForgeError
from tensorforge.memory import AllocationTrace, replay_bounded, replay_trace
from tensorforge.memory.pool.placement_policies import GRANULARITY, ONLINE, POLICY_NAMES
from tensorforge.memory.traces.pool_advice import advise_pool
from tensorforge.memory.traces.torch_snapshot import (
    load_trace,
    snapshot_of_replay,
    trace_of_snapshot,
)
from tensorforge.memory.traces.trace import Event

sizes = st.integers(1, 4000) | st.integers(1, 40 << 20) | st.sampled_from([512, 1 << 20, 2 << 20])


@st.composite
def traces(draw, max_size=40):
    """Allocations and releases in any legal order; some blocks are never freed."""
    events, live, now = [], {}, 0
    for block, (size, picks) in enumerate(
        draw(
            st.lists(st.tuples(sizes, st.lists(st.integers(0, 99), max_size=2)), max_size=max_size)
        )
    ):
        now += draw(st.integers(0, 5))
        events.append(Event(now / 1e6, block, size, f"op{block % 3}"))
        live[block] = size
        for pick in picks:
            if live:
                victim = list(live)[pick % len(live)]
                events.append(Event(now / 1e6, victim, -live.pop(victim)))
    return AllocationTrace(events, name="drawn")


def assert_no_overlap(trace, result):
    placed = [
        (life, result.position(life.block), result.position(life.block) + life.size)
        for life in trace.lifetimes()
    ]
    for index, (one, low, high) in enumerate(placed):
        assert low >= 0
        assert high <= result.peak_reserved
        for other, other_low, other_high in placed[:index]:
            together = one.start < other.stop and other.start < one.stop
            assert not together or high <= other_low or other_high <= low


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(trace=traces())
@settings(max_examples=40)
def test_blocks_alive_together_never_overlap(policy, trace):
    result = replay_trace(trace, policy)
    assert_no_overlap(trace, result)
    assert result.peak_live == trace.peak_live
    assert result.overhead >= 1.0
    assert list(result.reserved) == sorted(result.reserved)
    assert len(result.reserved) == len(trace)


@pytest.mark.parametrize("policy", ONLINE)
@given(trace=traces())
@settings(max_examples=25)
def test_a_policy_that_got_everything_back_is_as_new(policy, trace):
    placer = ONLINE[policy]()
    where, live = {}, {}
    for event in trace.events:
        if event.size > 0:
            where[event.block], live[event.block] = placer.allocate(event.size), event.size
        else:
            placer.free(where[event.block], live.pop(event.block))
    for block, size in live.items():
        placer.free(where[block], size)
    before = placer.reserved
    if before:
        placer.allocate(max(event.size for event in trace.events))
        assert placer.reserved == before


def rounded_peak(trace):
    live = peak = 0
    for event in trace.events:
        nbytes = -(-abs(event.size) // GRANULARITY) * GRANULARITY
        live += nbytes if event.size > 0 else -nbytes
        peak = max(peak, live)
    return peak


@given(traces())
@settings(max_examples=60)
def test_with_compaction_a_pool_as_large_as_what_is_in_use_is_enough(trace):
    capacity = rounded_peak(trace)
    if capacity:
        assert replay_bounded(trace, capacity, compact=True).fits
        assert not replay_bounded(trace, capacity - GRANULARITY or 1, compact=True).fits


@given(traces())
@settings(max_examples=30)
def test_advice_holds_when_it_is_followed(trace):
    if not trace.events:
        return
    advice = advise_pool(trace, page_size=4096)
    assert advice.fits
    assert replay_bounded(trace, advice.smallest_pool).fits
    assert replay_bounded(trace, advice.smallest_with_compaction, compact=True).fits
    assert advice.smallest_with_compaction <= advice.smallest_pool <= advice.recommended_pool
    assert advice.peak_live <= advice.smallest_planned


def same(one, other):
    return [(round(e.time * 1e6), e.block, e.size, e.label) for e in one.events] == [
        (round(e.time * 1e6), e.block, e.size, e.label) for e in other.events
    ]


@given(traces(), st.sampled_from([".json", ".json.gz"]))
@settings(max_examples=30)
def test_a_trace_survives_its_file(tmp_path_factory, trace, suffix):
    path = tmp_path_factory.mktemp("trace") / f"t{suffix}"
    trace.save(path)
    assert same(AllocationTrace.load(path), trace)
    assert same(load_trace(path), trace)


@given(traces(), st.sampled_from(POLICY_NAMES))
@settings(max_examples=40)
def test_a_trace_survives_pytorchs_snapshot_format(trace, policy):
    snapshot = snapshot_of_replay(trace, replay_trace(trace, policy))
    again = trace_of_snapshot(json.loads(json.dumps(snapshot)))
    assert [(e.block, e.size) for e in again.events] == [(e.block, e.size) for e in trace.events]
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["events", "labels", "name", "type", "version", "segments", "device_traces"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@given(junk, st.sampled_from(["events", "labels", "version", "device_traces", "segments"]))
def test_no_damage_ends_in_anything_but_an_error_of_ours(data, place):
    trace = {"type": "allocation-trace", "version": 1, "name": "x", "labels": [""], "events": []}
    for broken in (trace | {place: data}, data):
        for read in (AllocationTrace.from_json, trace_of_snapshot):
            try:
                assert isinstance(read(broken), AllocationTrace)
            except TensorForgeError as error:
                assert str(error)


@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_end_in_anything_but_an_error_of_ours(tmp_path_factory, raw, as_pickle):
    path = tmp_path_factory.mktemp("junk") / "trace"
    path.write_bytes(pickle.dumps({"device_traces": []})[:3] + raw if as_pickle else raw)
    try:
        assert isinstance(load_trace(path), AllocationTrace)
    except TensorForgeError as error:
        assert str(error)
