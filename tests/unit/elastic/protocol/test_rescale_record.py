import msgspec

from tensorforge.elastic.protocol.rescale_record import RescalePhase, RescaleRecord

RECORD = RescaleRecord(
    generation=2,
    type="scale_down",
    reason="because",
    urgent=True,
    paused=False,
    added=(),
    removed={},
    old_size=2,
    new_size=1,
    detection_ms=1.0,
    decision_ms=2.0,
    barrier_ms=3.0,
)


def test_only_the_phases_that_have_ended_have_a_time():
    assert RECORD.milliseconds == {
        RescalePhase.DETECTION: 1.0,
        RescalePhase.DECISION: 2.0,
        RescalePhase.BARRIER: 3.0,
    }
    assert RECORD.total_ms is None


def test_the_phases_add_up_once_all_have_ended():
    done = msgspec.structs.replace(RECORD, forming_ms=4.0, first_commit_ms=5.0)
    assert list(done.milliseconds) == list(RescalePhase)
    assert done.total_ms == 15.0


def test_a_phase_has_a_label_for_people():
    assert [phase.label for phase in RescalePhase][-1] == "first commit"
