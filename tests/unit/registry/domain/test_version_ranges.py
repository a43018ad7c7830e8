import pytest

from tensorforge.errors import InvalidInputError
from tensorforge.registry import parse_range
from tensorforge.registry.domain.version_ranges import is_range
from tensorforge.registry.domain.versions import MAX_PART, ModelVersion, parse_version

CASES = [
    ("1.2.3", ["1.2.3"], ["1.2.2", "1.2.4"]),
    ("=1.2.3", ["1.2.3"], ["1.2.4"]),
    ("^1.2.3", ["1.2.3", "1.2.4", "1.9.0"], ["1.2.2", "2.0.0", "0.9.9"]),
    ("^1.2", ["1.2.0", "1.9.9"], ["1.1.9", "2.0.0"]),
    ("^1", ["1.0.0", "1.9.9"], ["0.9.9", "2.0.0"]),
    ("^0.2.3", ["0.2.3", "0.2.9"], ["0.2.2", "0.3.0", "1.0.0"]),
    ("^0.0.3", ["0.0.3"], ["0.0.2", "0.0.4"]),
    ("^0.0", ["0.0.0", "0.0.9"], ["0.1.0"]),
    ("^0", ["0.0.0", "0.9.9"], ["1.0.0"]),
    ("~1.2.3", ["1.2.3", "1.2.9"], ["1.2.2", "1.3.0"]),
    ("~1.2", ["1.2.0", "1.2.9"], ["1.3.0", "1.1.9"]),
    ("~1", ["1.0.0", "1.9.9"], ["2.0.0"]),
    ("1", ["1.0.0", "1.9.9"], ["0.9.9", "2.0.0"]),
    ("1.x", ["1.0.0", "1.9.9"], ["2.0.0"]),
    ("1.2.*", ["1.2.0", "1.2.9"], ["1.3.0"]),
    ("*", ["0.0.0", "1.2.3", f"{MAX_PART}.{MAX_PART}.{MAX_PART}"], []),
    (">=1.2 <2", ["1.2.0", "1.9.9"], ["1.1.9", "2.0.0"]),
    (">= 1.2 , < 2", ["1.2.0", "1.9.9"], ["1.1.9", "2.0.0"]),
    (">1.2.3", ["1.2.4", "9.9.9"], ["1.2.3"]),
    (">1.2", ["1.3.0"], ["1.2.9"]),
    ("<1.2.3", ["0.0.0", "1.2.2"], ["1.2.3"]),
    ("<=1.2", ["1.2.9", "0.0.0"], ["1.3.0"]),
    (f"^{MAX_PART}", [f"{MAX_PART}.{MAX_PART}.{MAX_PART}"], ["1.0.0"]),
]


@pytest.mark.parametrize(("text", "inside", "outside"), CASES)
def test_a_range_holds_exactly_what_it_says(text, inside, outside):
    versions = parse_range(text)
    assert [v for v in inside if parse_version(v) not in versions] == []
    assert [v for v in outside if parse_version(v) in versions] == []


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "^", "latest", "Production", "champion", "v1", "1.2.3.4", "1..2", "^^1", "==1"),
        *("1.2.3-rc1", "01.2", "-1", "1 - 2", "1 || 2", "x.1.2.3", "^1.2; DROP TABLE", "٣", "1,"),
        f"{MAX_PART + 1}",
        "1" * 201,
    ],
)
def test_what_is_no_range_is_refused_by_name(text):
    assert not is_range(text)
    with pytest.raises(InvalidInputError):
        parse_range(text)


def test_bounds_that_exclude_each_other_hold_nothing():
    versions = parse_range(">=2 <1")
    assert versions.is_empty
    assert ModelVersion(1, 5, 0) not in versions
    assert not parse_range("*").is_empty
