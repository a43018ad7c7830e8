"""Laws of versions, ranges, shapes, verdicts and filters."""

from __future__ import annotations

import contextlib
import math

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.registry.sample_values import S, metadata, result

from tensorforge.errors import (
    InvalidInputError,
)
from tensorforge.registry import (
    Bump,
    ModelVersion,
    Sla,
    assess_rollback,
    compare_versions,
    decide_canary,
    due_bump,
    format_version,
    meets_sla,
    parse_range,
    parse_version,
    select_best_model,
    shape_compatibility,
)
from tensorforge.registry.domain.filters import parse_filter
from tensorforge.registry.domain.models import TensorSpec
from tensorforge.registry.domain.shapes import Interface
from tensorforge.registry.domain.versions import MAX_PART

parts = st.integers(0, MAX_PART) | st.integers(0, 3)
versions = st.builds(ModelVersion, parts, parts, parts)
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
figures = st.floats(min_value=0) | st.just(math.nan)


@given(versions)
def test_a_version_survives_its_text(version):
    assert parse_version(format_version(version)) == version


@given(st.text(max_size=20))
def test_a_text_that_is_a_version_is_its_own_spelling(text):
    version = parse_version(text)
    assert version is None or format_version(version) == text


@given(versions, versions, versions)
def test_versions_are_totally_ordered(a, b, c):
    assert compare_versions(a, b) == -compare_versions(b, a)
    assert (compare_versions(a, b) == 0) == (a == b)
    if compare_versions(a, b) <= 0 and compare_versions(b, c) <= 0:
        assert compare_versions(a, c) <= 0


@given(versions, versions)
def test_caret_tilde_and_exact_ranges_agree_with_their_definition(base, other):
    text = format_version(base)
    assert (other in parse_range(text)) == (other == base)
    tilde = other >= base and (other.major, other.minor) == (base.major, base.minor)
    assert (other in parse_range(f"~{text}")) == tilde
    if base.major:
        assert (other in parse_range(f"^{text}")) == (other >= base and other.major == base.major)
    assert (other in parse_range(f">={text}")) == (other >= base)
    assert (other in parse_range(f"<{text}")) != (other in parse_range(f">={text}"))
    assert (other in parse_range(f"<={text}")) != (other in parse_range(f">{text}"))


@given(st.text(alphabet="0123456789.^~<>=xX*, v", max_size=25))
def test_a_range_is_read_or_refused_never_crashes(text):
    try:
        found = parse_range(text)
    except InvalidInputError:
        return
    assert found.is_empty or found.low < (found.high or (math.inf,))


@given(shapes, shapes, shapes, shapes)
def test_shape_compatibility_is_symmetric_bounded_and_one_only_for_equals(a, b, c, d):
    score = shape_compatibility(a, b, c, d)
    assert score == shape_compatibility(c, d, a, b)
    assert 0 <= score <= 1
    assert (score == 1) == ((a, b) == (c, d))


interfaces = st.builds(
    Interface,
    shapes,
    shapes,
    st.dictionaries(
        st.sampled_from("abc"), st.builds(TensorSpec, st.sampled_from(["F32", "BF16"]), shapes)
    ),
)


@given(interfaces, interfaces)
def test_a_change_back_and_forth_is_never_only_a_patch_unless_nothing_changed(a, b):
    assert due_bump(a, a).bump is Bump.PATCH
    declared = all(
        (a.input_shape, a.output_shape, a.tensors, b.input_shape, b.output_shape, b.tensors)
    )
    if declared and due_bump(a, b).bump is Bump.PATCH:
        assert a == b


results = st.builds(
    lambda accuracy, p99, errors, samples: result(
        accuracy=accuracy, p99=p99, errors=errors, samples=samples
    ),
    figures,
    figures,
    st.lists(st.text(max_size=3), max_size=3).map(tuple),
    st.none() | st.integers(0, 10_000),
)


@given(results, results)
def test_a_rollback_priority_is_a_number_and_zero_exactly_without_reasons(current, baseline):
    found = assess_rollback(current, baseline)
    assert found.priority >= 0
    assert (found.priority == 0) == (not found.reasons) or found.priority < 1e-300
    assert assess_rollback(baseline, baseline).reasons == ()


@given(results, st.none() | results)
def test_a_canary_that_passes_meets_the_sla(canary, baseline):
    sla = Sla(max_latency_ms=100, min_accuracy=0.5)
    decision = decide_canary(canary, baseline, sla)
    assert decision.reasons
    if decision.verdict.value == "pass":
        assert meets_sla(canary, 100, 0.5)


@given(st.lists(st.tuples(versions, st.sampled_from(list(S)), results), max_size=6), st.randoms())
def test_the_best_model_does_not_depend_on_the_order(pool, random):
    candidates = [(metadata(str(version), state=state), r) for version, state, r in pool]
    best = select_best_model(candidates)
    assert (best is None) == all(m.state not in (S.PRODUCTION, S.CANARY) for m, _ in candidates)
    shuffled = list(candidates)
    random.shuffle(shuffled)
    again = select_best_model(shuffled)
    assert (best and best.version) == (again and again.version)


@given(st.text(max_size=60))
def test_no_filter_crashes_the_parser(text):
    with contextlib.suppress(InvalidInputError):
        parse_filter(text)
