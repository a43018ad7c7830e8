"""The sentences that people read are derived from typed departures."""

import msgspec
import pytest

from tensorforge.elastic.protocol.reasons import Departure, DepartureKind

SENTENCES = [
    (Departure(kind=DepartureKind.FAILED, worker="a", detail="silent"), "a failed: silent"),
    (Departure(kind=DepartureKind.LEFT, worker="a", detail="SIGTERM"), "a leaves: SIGTERM"),
    (Departure(kind=DepartureKind.LEFT, worker="a"), "a leaves: it asked to"),
    (Departure(kind=DepartureKind.REMOVED, worker="a", by="x"), "a retires: x asked for it"),
    (
        Departure(kind=DepartureKind.SURPLUS, worker="a", by="x", workers=1),
        "a retires: x wants 1 worker",
    ),
    (Departure(kind=DepartureKind.UNKNOWN, worker="a", detail="a was here"), "a was here"),
]


@pytest.mark.parametrize(("departure", "sentence"), SENTENCES)
def test_a_departure_is_told_in_one_sentence(departure, sentence):
    assert str(departure) == sentence


@pytest.mark.parametrize("departure", [departure for departure, _ in SENTENCES])
def test_a_departure_survives_the_journal_and_the_wire(departure):
    assert msgspec.json.decode(msgspec.json.encode(departure), type=Departure) == departure


def test_every_kind_has_its_sentence():
    assert {departure.kind for departure, _ in SENTENCES} == set(DepartureKind)
