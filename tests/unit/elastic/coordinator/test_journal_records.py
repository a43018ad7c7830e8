"""Entries of the journal as text, those of the format without kinds of departures included."""

import json

import pytest

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.elastic.coordinator.journal_records import (
    Snapshot,
    entry_from_json,
    entry_to_json,
    replay,
)
from tensorforge.elastic.coordinator.machine.state_view import cluster_view
from tensorforge.elastic.protocol import commands
from tensorforge.elastic.protocol.reasons import Departure, DepartureKind, Requester
from tensorforge.errors import EncodingError
from tensorforge.testing.simulated_cluster import SimulatedCluster

CONFIG = ElasticTrainingConfig(stability_window_ms=5_000, failure_tolerance_percentage=100)


def seats(names):
    worker = {"hostname": "host", "port": 1}
    return [
        {"worker": {"id": name, **worker}, "incarnation": f"{name}-1", "pid": "1"} for name in names
    ]


def decided(generation, names, *, reason, removed, version=0):
    """A decision as it was written when a departure was a sentence and the record had the target's version."""
    return {
        "kind": "decided",
        "generation": generation,
        "old_generation": generation - 1,
        "seats": seats(names),
        "type": "scale_down" if removed else "scale_up",
        "reason": reason,
        "urgent": False,
        "paused": False,
        "added": [],
        "removed": removed,
        "target_version": version,
        "old_size": len(names) + len(removed),
        "detection_ms": 0.0,
        "decided_at": "2026-01-01T00:00:00.000+00:00",
    }


BROKE, SURPLUS = "c failed: its stream broke", "b retires: the launcher wants 1 worker"
WITHOUT_KINDS = [
    decided(1, "abc", reason="the first 3 workers are here", removed={}),
    {"kind": "wasformed", "generation": 1, "decision_ms": 1.0, "barrier_ms": 2.0, "moved": {}},
    decided(2, "ab", reason=BROKE, removed={"c": BROKE}),
    {"kind": "targetset", "workers": 1, "by": "the launcher"},
    decided(3, "a", reason=SURPLUS, removed={"b": SURPLUS}, version=1),
    {"kind": "wasformed", "generation": 3, "forming_ms": 3.0},
]


def replayed(entries):
    return replay(entry_from_json(json.dumps(entry)) for entry in entries)


def old_snapshot():
    """The same run after a compaction by a coordinator of that format."""
    state = json.loads(entry_to_json(Snapshot(state=replayed(WITHOUT_KINDS))))["state"]
    del state["target_requester"]
    for record in state["history"]:
        record["target_version"] = 0
        record["removed"] = {name: why["detail"] for name, why in record["removed"].items()}
    return {"kind": "snapshot", "state": state}


@pytest.mark.parametrize("entries", [WITHOUT_KINDS, [old_snapshot()]])
def test_a_journal_without_kinds_of_departures_replays(entries):
    state = replayed(entries)
    assert (state.generation, state.formed_generation) == (3, 3)
    assert [seat.worker.id for seat in state.seats] == ["a"]
    assert (state.desired_workers, state.target_version) == (1, 1)
    assert state.target_by == "the launcher"
    assert state.target_requester is Requester.OPERATOR
    assert [record.reason for record in state.history][1:] == [BROKE, SURPLUS]
    unknown = Departure(kind=DepartureKind.UNKNOWN, worker="b", detail=SURPLUS)
    assert state.history[-1].removed == {"b": unknown}


def test_a_coordinator_goes_on_with_a_journal_without_kinds():
    cluster = SimulatedCluster(CONFIG)
    cluster.journal += [json.dumps(entry) for entry in WITHOUT_KINDS]
    cluster.restart()
    cluster.feed(commands.Scale(3, "x"))
    view = cluster_view(cluster.machine.state, cluster.clock(), "default")
    assert (view.generation, view.desired_workers, view.target_version) == (3, 3, 2)
    assert [str(why) for record in view.rescales for why in record.removed.values()] == [
        BROKE,
        SURPLUS,
    ]


def test_every_entry_is_read_as_it_was_written():
    cluster = SimulatedCluster(CONFIG, desired_workers=3)
    for name in "abc":
        cluster.join(name)
    cluster.settle(step=0)
    cluster.disconnect(cluster.puppets["c"])
    cluster.settle(step=1)
    cluster.feed(commands.Scale(1, "x", requester=Requester.LAUNCHER))
    cluster.feed(commands.Stop("enough", "x"))
    for line in cluster.journal:
        assert entry_to_json(entry_from_json(line)) == line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"kind":"decided","removed":{"a":"b"}}',
        '{"kind":"snapshot","state":{"history":[7]}}',
        '{"kind":"snapshot","state":{"history":[{"removed":[1]}]}}',
        '{"kind":"targetset","workers":"many","by":"x"}',
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(EncodingError, match="not an entry of the journal"):
        entry_from_json(text)
