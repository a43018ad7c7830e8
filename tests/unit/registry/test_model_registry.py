import itertools
import math
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from tests.unit.registry.sample_values import BOSS, S, bring, metadata, result, v

from tensorforge.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidInputError,
    LostRaceError,
    NotFoundError,
    PermissionDeniedError,
    TransitionError,
)
from tensorforge.registry import (
    Actor,
    Bump,
    CanaryVerdict,
    Lineage,
    ModelRegistry,
    Sla,
    TensorSpec,
    can_transition_state,
)
from tensorforge.registry.database.writes.idempotency import RequestKey
from tensorforge.registry.domain.versions import MAX_PART

TOP = f"{MAX_PART}.{MAX_PART}.{MAX_PART}"


def test_what_was_registered_is_given_back_unchanged(stored):
    given = metadata(
        "1.2.3",
        tags={"team": "search", "note": "a\nb", "empty": ""},
        source="s3://bucket/model",
        description="Größe",
        lineage=Lineage(run_id="run-1", step=7, checkpoint_id="ck-7", run_link="http://x"),
    )
    kept = stored.register(given, actor=Actor(name="ann"))
    assert kept == stored.get("ranker", v("1.2.3"))
    assert kept.registered_by == "ann"
    assert (kept.number, kept.revision) == (1, 0)
    same = replace(kept, number=0, updated_at=None, registered_by="")
    assert same == given


def test_a_stored_registry_is_there_for_the_next_opener(database_url):
    with ModelRegistry(database_url) as registry:
        registry.register(metadata("1.0.0"))
    with ModelRegistry(database_url) as registry:
        assert registry.list_versions("ranker") == [v("1.0.0")]
        assert registry.verify_audit().sequence == 2


def test_what_does_not_exist_is_none_or_empty(registry):
    assert registry.get("nobody", v("1.0.0")) is None
    assert registry.get_latest("nobody") is None
    assert registry.get_validation("nobody", v("1.0.0")) is None
    assert registry.list_versions("nobody") == []
    assert registry.find_by_state(S.PRODUCTION) == []
    assert (registry.model_count(), registry.version_count()) == (0, 0)


def test_a_version_is_registered_once(stored):
    stored.register(metadata("1.0.0"))
    with pytest.raises(AlreadyExistsError, match=r"'ranker' has a version 1\.0\.0 already"):
        stored.register(metadata("1.0.0", checksum="other"))
    assert stored.get("ranker", v("1.0.0")).checksum == "sha256:abc"
    assert stored.verify_audit().sequence == 2


def test_the_latest_is_the_highest_number_not_the_newest(stored):
    for text in ("1.9.0", "1.10.0", "0.0.0", "1.2.0", TOP, "2.0.0"):
        stored.register(metadata(text))
    assert stored.get_latest("ranker").version == v(TOP)
    listed = [str(each) for each in stored.list_versions("ranker")]
    assert listed == ["0.0.0", "1.2.0", "1.9.0", "1.10.0", "2.0.0", TOP]
    assert [stored.get("ranker", v(text)).number for text in ("1.9.0", "2.0.0")] == [1, 6]


def test_models_and_versions_are_counted(registry):
    for model_id, version in itertools.product(("a", "b"), ("1.0.0", "1.1.0", "2.0.0")):
        registry.register(metadata(version, model_id))
    assert (registry.model_count(), registry.version_count()) == (2, 6)
    assert registry.get_model("a").version_count == 3


def test_find_by_state_covers_every_model(registry):
    for model_id in ("b", "a"):
        for version in ("1.0.0", "1.1.0"):
            registry.register(metadata(version, model_id))
        bring(registry, "1.1.0", S.CANARY, model_id=model_id)
    found = [(m.model_id, str(m.version)) for m in registry.find_by_state(S.CANARY)]
    assert found == [("a", "1.1.0"), ("b", "1.1.0")]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": "../x"},
        {"model_id": ""},
        {"state": S.PRODUCTION},
        {"input_shape": (1, -2)},
        {"input_shape": (1.5,)},
        {"output_shape": "12"},
        {"size_bytes": -1},
        {"size_bytes": 2**63},
        {"size_bytes": True},
        {"checksum": "\x00"},
        {"tags": {"k": 1}},
        {"source": "x" * 3000},
        {"lineage": Lineage(step=-1)},
        {"registered_at": datetime(2026, 1, 1)},  # noqa: DTZ001
    ],
)
def test_bad_metadata_is_refused_and_nothing_is_stored(registry, changes):
    with pytest.raises(InvalidInputError):
        registry.register(metadata(**changes))
    assert (registry.model_count(), registry.version_count()) == (0, 0)
    assert registry.verify_audit().sequence == 0


@pytest.mark.parametrize("current", [s for s in S if s is not S.ARCHIVED])
def test_a_version_changes_state_only_along_the_lifecycle(registry, current):
    registry.register(metadata())
    bring(registry, "1.0.0", current)
    for requested in [s for s in S if not can_transition_state(current, s)]:
        with pytest.raises(TransitionError) as caught:
            registry.transition_state("ranker", v("1.0.0"), requested, actor=BOSS)
        assert caught.value.current is current
        assert caught.value.requested is requested
        with pytest.raises(TransitionError):
            registry.transition_state(
                "ranker", v("1.0.0"), requested, actor=BOSS, force=True, reason="now"
            )
    assert registry.get("ranker", v("1.0.0")).state is current


def test_the_archive_is_final(registry):
    registry.register(metadata())
    bring(registry, "1.0.0", S.ARCHIVED)
    with pytest.raises(TransitionError, match="nothing: it is final"):
        registry.transition_state("ranker", v("1.0.0"), S.REGISTERED)


def test_a_transition_of_nothing_is_not_found(registry):
    with pytest.raises(NotFoundError, match="no model is called 'ranker'"):
        registry.transition_state("ranker", v("1.0.0"), S.VALIDATING)
    registry.register(metadata())
    with pytest.raises(NotFoundError, match=r"no version 9\.0\.0"):
        registry.transition_state("ranker", v("9.0.0"), S.VALIDATING)


def refused(registry, to, match):
    with pytest.raises(ConflictError, match=match):
        registry.transition_state("ranker", v("1.0.0"), to)


def test_staging_needs_a_validation_that_passed_and_meets_the_sla(stored):
    stored.register(metadata())
    stored.set_sla("ranker", Sla(max_latency_ms=20, min_accuracy=0.8))
    stored.transition_state("ranker", v("1.0.0"), S.VALIDATING)
    refused(stored, S.STAGING, "no validation was recorded since")
    stored.record_validation(result(errors=("crashed",)))
    refused(stored, S.STAGING, "did not pass: crashed")
    stored.record_validation(result(accuracy=math.nan))
    refused(stored, S.STAGING, "did not measure both")
    stored.record_validation(result(p99=21))
    refused(stored, S.STAGING, r"misses the SLA: p99 21 ms \(at most 20\)")
    stored.record_validation(result(accuracy=0.79))
    refused(stored, S.STAGING, "accuracy 0.79")
    stored.record_validation(result(p99=20, accuracy=0.8))
    stored.transition_state("ranker", v("1.0.0"), S.STAGING)
    evidence = stored.history("ranker")[-1].evidence
    assert evidence["accuracy"] == 0.8
    assert evidence["sla"] == {"max_latency_ms": 20.0, "min_accuracy": 0.8}


def test_production_needs_a_validation_from_the_canary_itself(registry):
    registry.register(metadata())
    bring(registry, "1.0.0", S.CANARY)
    refused(registry, S.PRODUCTION, "since the version entered canary")
    registry.record_validation(result())
    registry.transition_state("ranker", v("1.0.0"), S.PRODUCTION)


def test_evidence_of_an_earlier_visit_does_not_count(registry):
    registry.register(metadata())
    registry.transition_state("ranker", v("1.0.0"), S.VALIDATING)
    registry.record_validation(result())
    registry.transition_state("ranker", v("1.0.0"), S.REGISTERED)
    registry.transition_state("ranker", v("1.0.0"), S.VALIDATING)
    refused(registry, S.STAGING, "no validation was recorded since")


def test_only_the_newest_validation_counts(registry):
    registry.register(metadata())
    registry.transition_state("ranker", v("1.0.0"), S.VALIDATING)
    registry.record_validation(result())
    registry.record_validation(result(errors=("late failure",)))
    refused(registry, S.STAGING, "late failure")
    assert registry.get_validation("ranker", v("1.0.0")).errors == ("late failure",)
    assert len(registry.validations("ranker", v("1.0.0"))) == 2


def test_a_forced_transition_needs_its_permission_and_a_reason(registry):
    registry.register(metadata())
    registry.transition_state("ranker", v("1.0.0"), S.VALIDATING)
    staging = ("ranker", v("1.0.0"), S.STAGING)
    with pytest.raises(PermissionDeniedError, match="registry:force"):
        registry.transition_state(*staging, actor=Actor(name="eve"), force=True, reason="now")
    with pytest.raises(InvalidInputError, match="needs a reason"):
        registry.transition_state(*staging, actor=BOSS, force=True, reason="  ")
    assert registry.get("ranker", v("1.0.0")).state is S.VALIDATING
    registry.transition_state(*staging, actor=BOSS, force=True, reason="outage")
    last = registry.history("ranker")[-1]
    assert (last.actor, last.reason, last.forced) == ("boss", "outage", True)
    assert "no validation was recorded" in last.evidence["overridden"]


def test_a_transition_with_an_outdated_revision_is_refused(registry):
    registry.register(metadata())
    registry.transition_state("ranker", v("1.0.0"), S.VALIDATING, expected_revision=0)
    with pytest.raises(LostRaceError, match="expected revision 0, found 1"):
        registry.transition_state("ranker", v("1.0.0"), S.REGISTERED, expected_revision=0)


def test_nan_figures_are_kept_as_nan(stored):
    stored.register(metadata())
    stored.record_validation(result(accuracy=math.nan, p99=math.inf))
    kept = stored.get_validation("ranker", v("1.0.0"))
    assert math.isnan(kept.accuracy_score)
    assert kept.latency_p99_ms == math.inf


@pytest.mark.parametrize(
    "bad",
    [
        replace(result(), passed="yes"),
        replace(result(), latency_p99_ms="fast"),
        replace(result(), latency_p50_ms=-1.0),
        replace(result(), accuracy_score=True),
        replace(result(), samples=-1),
        replace(result(), errors=("x",) * 101),
        replace(result(), errors=("\x00",)),
    ],
)
def test_a_validation_without_meaning_is_refused(registry, bad):
    registry.register(metadata())
    with pytest.raises(InvalidInputError):
        registry.record_validation(bad)
    assert registry.get_validation("ranker", v("1.0.0")) is None


def test_a_validation_of_nothing_is_not_found(registry):
    with pytest.raises(NotFoundError):
        registry.record_validation(result())


def test_a_breaking_change_needs_a_major_version(stored):
    stored.register(metadata("1.0.0"))
    with pytest.raises(ConflictError, match="needs a new major version") as caught:
        stored.register(metadata("1.1.0", input_shape=(5,)))
    assert "input shape changed from [4] to [5]" in str(caught.value)
    stored.register(metadata("2.0.0", input_shape=(5,)))
    with pytest.raises(ConflictError, match=r"would break users of 2\.0\.0"):
        stored.register(metadata("2.0.1"))
    stored.register(metadata("1.0.1"))


def test_the_due_version_follows_from_the_change_of_shapes(registry):
    weights = {"w": TensorSpec("F32", (2, 4))}
    wider = {"w": TensorSpec("F32", (2, 5))}
    more = {**weights, "b": TensorSpec("F32", (2,))}
    kept = [
        registry.register_next(metadata(), tensors=weights),
        registry.register_next(metadata(), tensors=weights),
        registry.register_next(metadata(), tensors=more),
        registry.register_next(metadata(), tensors=wider),
        registry.register_next(metadata(), tensors=wider, least=Bump.MINOR),
    ]
    assert [str(stored.version) for stored, _ in kept] == [
        *("1.0.0", "1.0.1", "1.1.0", "2.0.0", "2.1.0")
    ]
    assert kept[3][1].bump is Bump.MAJOR
    assert registry.tensors("ranker", v("2.0.0")) == wider


def test_the_same_request_under_the_same_key_has_one_effect(stored):
    key = RequestKey(caller="ci", key="k-1", digest="d1")
    first = stored.register(metadata(), request_key=key)
    assert stored.register(metadata(), request_key=key) == first
    assert stored.version_count() == 1
    with pytest.raises(ConflictError, match="used before, for another request"):
        stored.register(metadata("2.0.0"), request_key=replace(key, digest="d2"))
    with pytest.raises(AlreadyExistsError):
        stored.register(metadata(), request_key=replace(key, caller="other"))


def test_a_request_key_is_forgotten_after_a_day(registry, clock):
    key = RequestKey(caller="ci", key="k-1", digest="d1")
    registry.register(metadata("1.0.0"), request_key=key)
    clock.advance(25 * 3600)
    registry.register(metadata("1.1.0"), request_key=RequestKey(caller="ci", key="k2", digest="d"))
    registry.register(metadata("1.2.0"), request_key=replace(key, digest="d3"))


def test_what_served_when_can_be_told_for_every_moment(stored, clock):
    for version in ("1.0.0", "1.1.0"):
        stored.register(metadata(version))
    start = clock.utc
    clock.advance(10)
    bring(stored, "1.0.0", S.PRODUCTION)
    clock.advance(10)
    bring(stored, "1.1.0", S.PRODUCTION)
    clock.advance(10)
    stored.rollback("ranker", reason="slow")
    clock.advance(10)
    stored.transition_state("ranker", v("1.0.0"), S.DEPRECATED)

    def at(seconds):
        found = stored.production_at("ranker", start + timedelta(seconds=seconds))
        return found and str(found)

    served = {0: None, 9: None, 10: "1.0.0", 19: "1.0.0", 20: "1.1.0", 30: "1.0.0", 40: None}
    assert {seconds: at(seconds) for seconds in served} == served
    assert stored.production("ranker") is None


def test_a_rollback_takes_the_best_version_that_stands_by(stored):
    for version, accuracy in (("1.0.0", 0.95), ("1.1.0", 0.90), ("1.2.0", 0.99)):
        stored.register(metadata(version))
        bring(stored, version, S.PRODUCTION, accuracy=accuracy)
    stored.record_validation(result("1.2.0", accuracy=0.5))
    done = stored.rollback("ranker", reason="drift", actor=BOSS)
    assert (str(done.previous), str(done.current)) == ("1.2.0", "1.0.0")
    assert "accuracy fell by 0.45 to 0.5" in done.reasons
    assert stored.get("ranker", v("1.2.0")).state is S.DEPRECATED
    assert stored.production("ranker").version == v("1.0.0")
    last = stored.history("ranker")[-1]
    assert (last.action, last.reason, last.actor) == ("rollback", "drift", "boss")
    assert last.evidence["serves_now"] == "1.0.0"


def test_a_rollback_can_name_its_target(registry):
    for version in ("1.0.0", "1.1.0", "1.2.0"):
        registry.register(metadata(version))
        bring(registry, version, S.PRODUCTION)
    with pytest.raises(NotFoundError, match=r"these do: 1\.0\.0, 1\.1\.0"):
        registry.rollback("ranker", to=v("9.9.9"))
    assert registry.rollback("ranker", to=v("1.0.0")).current == v("1.0.0")


def test_a_rollback_without_a_way_back_changes_nothing(registry):
    registry.register(metadata())
    with pytest.raises(ConflictError, match="no version of 'ranker' is in production"):
        registry.rollback("ranker")
    bring(registry, "1.0.0", S.PRODUCTION)
    with pytest.raises(ConflictError, match="nothing to go back to"):
        registry.rollback("ranker")
    assert registry.production("ranker").version == v("1.0.0")


def test_a_transition_can_retire_what_served_before(registry):
    for version in ("1.0.0", "1.1.0"):
        registry.register(metadata(version))
    bring(registry, "1.0.0", S.PRODUCTION)
    bring(registry, "1.1.0", S.CANARY)
    registry.record_validation(result("1.1.0"))
    registry.transition_state("ranker", v("1.1.0"), S.PRODUCTION, retire_previous=True)
    assert registry.get("ranker", v("1.0.0")).state is S.DEPRECATED
    assert registry.production("ranker").version == v("1.1.0")


def test_the_canary_is_judged_against_what_serves(registry):
    for version, accuracy in (("1.0.0", 0.95), ("1.1.0", 0.80)):
        registry.register(metadata(version))
        bring(
            registry, version, S.PRODUCTION if version == "1.0.0" else S.CANARY, accuracy=accuracy
        )
    assert registry.canary_decision("ranker", v("1.1.0")).verdict is CanaryVerdict.FAIL
    registry.register(metadata("1.2.0"))
    with pytest.raises(NotFoundError, match="no validation"):
        registry.canary_decision("ranker", v("1.2.0"))


def test_an_alias_points_to_one_version_at_a_time(stored):
    for version in ("1.0.0", "1.1.0"):
        stored.register(metadata(version))
    stored.set_alias("ranker", "champion", v("1.0.0"))
    stored.set_alias("ranker", "stable", v("1.0.0"))
    assert stored.get("ranker", v("1.0.0")).aliases == ("champion", "stable")
    stored.set_alias("ranker", "champion", v("1.1.0"))
    assert stored.get_by_alias("ranker", "champion").version == v("1.1.0")
    assert stored.get_model("ranker").aliases == {"champion": v("1.1.0"), "stable": v("1.0.0")}
    stored.delete_alias("ranker", "champion")
    with pytest.raises(NotFoundError):
        stored.get_by_alias("ranker", "champion")
    with pytest.raises(NotFoundError):
        stored.delete_alias("ranker", "champion")
    with pytest.raises(NotFoundError):
        stored.set_alias("ranker", "champion", v("9.0.0"))


def test_tags_are_set_replaced_and_removed(stored):
    stored.register(metadata(tags={"a": "1"}))
    stored.set_tags("ranker", v("1.0.0"), put={"a": "2", "b": "3"})
    stored.set_tags("ranker", v("1.0.0"), drop=["b", "absent"])
    assert stored.get("ranker", v("1.0.0")).tags == {"a": "2"}
    stored.set_tags("ranker", put={"team": "x"})
    assert stored.get_model("ranker").tags == {"team": "x"}
    with pytest.raises(InvalidInputError):
        stored.set_tags("ranker", put={f"k{i}": "" for i in range(200)})
    assert stored.get_model("ranker").tags == {"team": "x"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("latest", "2.0.0"),
        ("LATEST", "2.0.0"),
        ("^1", "1.2.0"),
        ("^1.0 <1.2", "1.0.0"),
        ("1.1.0", "1.1.0"),
        ("~1.0", "1.0.0"),
        ("*", "2.0.0"),
        ("production", "1.0.0"),
        ("Staging", "1.2.0"),
        ("champion", "1.0.0"),
        ("@champion", "1.0.0"),
    ],
)
def test_a_text_finds_the_version_that_it_means(registry, wanted, found):
    for version in ("1.0.0", "1.1.0", "1.2.0", "2.0.0"):
        registry.register(metadata(version))
    bring(registry, "1.0.0", S.PRODUCTION)
    bring(registry, "1.1.0", S.ARCHIVED)
    bring(registry, "1.2.0", S.STAGING)
    registry.set_alias("ranker", "champion", v("1.0.0"))
    assert str(registry.resolve("ranker", wanted).version) == found


@pytest.mark.parametrize("wanted", ["^3", "canary", "nobody", "9.9.9", "~1.1"])
def test_a_text_that_means_nothing_here_is_not_found(registry, wanted):
    registry.register(metadata("1.0.0"))
    registry.register(metadata("1.1.0"))
    bring(registry, "1.1.0", S.DEPRECATED)
    with pytest.raises(NotFoundError):
        registry.resolve("ranker", wanted)


def test_a_model_can_be_renamed_and_keeps_everything(stored):
    stored.register(metadata())
    stored.create_model("taken")
    with pytest.raises(AlreadyExistsError):
        stored.rename_model("ranker", "taken")
    stored.rename_model("ranker", "sorter")
    assert stored.get("sorter", v("1.0.0")).model_id == "sorter"
    with pytest.raises(NotFoundError):
        stored.get_model("ranker")
    assert [entry.action for entry in stored.history("sorter")] == [
        *("create_model", "register", "rename_model")
    ]
    stored.verify_audit()


def test_what_serves_cannot_be_deleted(stored):
    stored.register(metadata())
    bring(stored, "1.0.0", S.CANARY)
    with pytest.raises(ConflictError, match="is in canary"):
        stored.delete_version("ranker", v("1.0.0"))
    with pytest.raises(ConflictError, match="is in canary"):
        stored.delete_model("ranker")
    stored.transition_state("ranker", v("1.0.0"), S.STAGING)
    stored.set_alias("ranker", "champion", v("1.0.0"))
    stored.delete_version("ranker", v("1.0.0"))
    assert stored.get("ranker", v("1.0.0")) is None
    assert stored.get_model("ranker").aliases == {}
    assert stored.get_model("ranker").version_count == 0
    stored.delete_model("ranker")
    assert stored.model_count() == 0
    assert stored.history("ranker")[-1].action == "delete_model"
    stored.verify_audit()


def test_numbers_are_never_given_twice(registry):
    for version in ("1.0.0", "1.1.0"):
        registry.register(metadata(version))
    registry.delete_version("ranker", v("1.1.0"))
    assert registry.register(metadata("1.1.0")).number == 3
    assert registry.get_by_number("ranker", 2) is None
    assert registry.get_by_number("ranker", 3).version == v("1.1.0")


def test_descriptions_can_be_replaced(registry):
    registry.create_model("ranker", description="old", tags={"a": "b"})
    with pytest.raises(AlreadyExistsError):
        registry.create_model("ranker")
    assert registry.describe_model("ranker", "new").description == "new"
    registry.register(metadata())
    assert registry.describe_version("ranker", v("1.0.0"), "text").description == "text"


def test_two_versions_can_be_compared(registry):
    registry.register(metadata("1.0.0", tags={"a": "1", "same": "x"}))
    registry.register(metadata("2.0.0", tags={"b": "2", "same": "x"}, output_shape=(3,)))
    registry.record_validation(result("1.0.0", accuracy=0.9))
    registry.record_validation(result("2.0.0", accuracy=0.8))
    diff = registry.diff("ranker", v("1.0.0"), v("2.0.0"))
    assert diff.due.bump is Bump.MAJOR
    assert diff.compatibility == 0.5
    assert diff.fields == {"output_shape": ("[2]", "[3]")}
    assert diff.tags == {"a": ("1", None), "b": (None, "2")}
    assert diff.rollback.priority == pytest.approx(1.0)


def test_the_history_can_be_read_in_pieces(registry):
    for version in ("1.0.0", "1.1.0"):
        registry.register(metadata(version))
    bring(registry, "1.0.0", S.STAGING)
    whole = registry.history("ranker")
    first = registry.history("ranker", limit=2)
    assert first + registry.history("ranker", after=first[-1].sequence) == whole
    only = registry.history("ranker", version=v("1.1.0"))
    assert [entry.version for entry in only] == ["1.1.0"]
    with pytest.raises(NotFoundError, match="is or was called"):
        registry.history("nobody")
