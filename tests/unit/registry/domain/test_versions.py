import pytest

from tensorforge.errors import InvalidInputError
from tensorforge.registry import Bump, ModelVersion, compare_versions, format_version, parse_version
from tensorforge.registry.domain.versions import MAX_PART, require_version


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.0.0", (0, 0, 0)),
        ("1.2.3", (1, 2, 3)),
        ("10.200.3000", (10, 200, 3000)),
        (f"{MAX_PART}.{MAX_PART}.{MAX_PART}", (MAX_PART, MAX_PART, MAX_PART)),
    ],
)
def test_three_plain_numbers_are_a_version_and_read_back(text, parts):
    version = parse_version(text)
    assert version == ModelVersion(*parts)
    assert format_version(version) == str(version) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ".", "..", "...", "1", "1.2", "1.2.", ".1.2", "1..2", "1.2.3.4", "1.2.3."),
        *("v1.2.3", "1.2.x", "a.b.c", "1.2.3-rc1", "1.2.3+build", "-1.2.3", "+1.2.3", "1.-2.3"),
        *(" 1.2.3", "1.2.3 ", "1. 2.3", "1.2.3\n", "01.2.3", "1.02.3", "1.2.00", "1_0.2.3"),
        *(
            "1e1.2.3",
            "0x1.2.3",
            "1,2,3",
            "\u0661.\u0662.\u0663",
            "1.2.³",
            "\uff11.2.3",
            "1.2.3\x00",
        ),
        f"{MAX_PART + 1}.0.0",
        f"0.{MAX_PART + 1}.0",
        f"0.0.{MAX_PART + 1}",
        "1" * 5000 + ".0.0",
    ],
)
def test_anything_else_is_none(text):
    assert parse_version(text) is None


@pytest.mark.parametrize("value", [None, 1, 1.2, b"1.2.3", ("1", "2", "3")])
def test_what_is_not_even_a_text_is_none(value):
    assert parse_version(value) is None


def test_a_version_that_must_be_one_is_refused_by_name():
    assert require_version("1.2.3") == ModelVersion(1, 2, 3)
    with pytest.raises(InvalidInputError, match=r"'1\.2' is not a version"):
        require_version("1.2")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("0.0.0", "0.0.0", 0),
        ("0.0.0", "0.0.1", -1),
        ("0.0.1", "0.0.0", 1),
        ("0.9.9", "1.0.0", -1),
        ("1.10.0", "1.9.0", 1),
        ("1.0.10", "1.0.9", 1),
        ("2.0.0", "10.0.0", -1),
        (f"0.0.{MAX_PART}", "0.1.0", -1),
        (f"{MAX_PART}.{MAX_PART}.{MAX_PART}", f"{MAX_PART}.{MAX_PART}.{MAX_PART}", 0),
        (f"{MAX_PART}.{MAX_PART}.{MAX_PART}", f"{MAX_PART}.{MAX_PART}.{MAX_PART - 1}", 1),
    ],
)
def test_versions_compare_by_number_not_by_text(a, b, expected):
    assert compare_versions(parse_version(a), parse_version(b)) == expected


@pytest.mark.parametrize("parts", [(-1, 0, 0), (0, 0, MAX_PART + 1), (True, 0, 0), (1.0, 0, 0)])
def test_a_version_cannot_be_made_of_anything_else(parts):
    with pytest.raises(InvalidInputError):
        ModelVersion(*parts)


def test_a_bump_resets_what_comes_after():
    version = ModelVersion(1, 2, 3)
    assert version.next(Bump.PATCH) == ModelVersion(1, 2, 4)
    assert version.next(Bump.MINOR) == ModelVersion(1, 3, 0)
    assert version.next(Bump.MAJOR) == ModelVersion(2, 0, 0)


def test_a_version_at_its_maximum_never_wraps_around():
    top = ModelVersion(MAX_PART, MAX_PART, MAX_PART)
    for bump in Bump:
        with pytest.raises(InvalidInputError, match=str(MAX_PART)):
            top.next(bump)
