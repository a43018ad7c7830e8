"""What is on the wire is checked before any logic sees it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.elastic import WorkerId
from tensorforge.elastic.protocol import commands, messages
from tensorforge.errors import EncodingError

HELLO = messages.Hello(protocol=messages.PROTOCOL, worker=WorkerId("w", "h", 1), incarnation="i")


def altered(**changes):
    return json.dumps({**json.loads(messages.to_bytes(HELLO)), **changes}).encode()


def test_a_message_comes_back_as_it_was():
    assert messages.from_worker(messages.to_bytes(HELLO)) == HELLO


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95",
        b"[]",
        b'{"kind": "shutdown"}',
        altered(kind="ready"),
        altered(extra=1),
        altered(protocol="1"),
        altered(incarnation=""),
        altered(incarnation="x" * 201),
        altered(worker={"id": "", "hostname": "h", "port": 1}),
        altered(worker={"id": "a", "hostname": "h", "port": 99_999}),
        altered(attributes={"k": "v" * 5000}),
        altered(attributes={str(index): "" for index in range(65)}),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(EncodingError, match="not a message of a worker"):
        messages.from_worker(data)


@given(st.binary(max_size=200))
def test_noise_is_refused(data):
    with pytest.raises(EncodingError):
        messages.from_worker(data)
    with pytest.raises(EncodingError):
        commands.from_bytes(data, "peer")


IDS = st.lists(st.integers(0, 12), unique=True, max_size=10)


def workers(numbers):
    return tuple(WorkerId(f"w{number}", "h", 1) for number in numbers)


@given(old=IDS, new=IDS)
def test_a_change_leads_from_the_old_members_to_the_new_ones(old, new):
    change = messages.change_between(workers(old), workers(new))
    if change is None:
        stays = [number for number in old if number in new]
        assert stays != [number for number in new if number in old]
    else:
        assert messages.apply_change(workers(old), change) == workers(new)


@given(st.lists(st.tuples(st.integers(-1, 2), st.booleans()), max_size=20))
def test_reports_travel_as_runs_and_come_back_as_they_were(said):
    reports = tuple(
        messages.MemberReport(committed_step=step, is_newcomer=is_new) for step, is_new in said
    )
    distinct, runs = messages.distinct_runs(reports)
    notice = messages.FormationNotice(
        generation=1, distinct=distinct, runs=runs, verdict=messages.Verdict(target_step=0)
    )
    again = messages.from_coordinator(messages.to_bytes(notice))
    assert again.reports == reports
    assert len(set(map(repr, distinct))) == len(distinct)


def test_a_thousand_members_that_say_the_same_cost_a_few_hundred_bytes():
    reports = [messages.MemberReport(committed_step=7)] * 1000
    distinct, runs = messages.distinct_runs(reports)
    notice = messages.FormationNotice(
        generation=1, distinct=distinct, runs=runs, verdict=messages.Verdict(target_step=7)
    )
    assert len(messages.to_bytes(notice)) < 500
