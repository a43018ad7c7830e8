import pytest

from tensorforge.errors import InvalidInputError
from tensorforge.registry.domain.filters import Comparison, Ordering, parse_filter, parse_ordering


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("  ", ()),
        ("name = 'a'", (Comparison("name", None, "=", "a"),)),
        ("NAME='it''s'", (Comparison("name", None, "=", "it's"),)),
        ('name = "a"', (Comparison("name", None, "=", "a"),)),
        ("name LIKE '%a_'", (Comparison("name", None, "LIKE", "%a_"),)),
        ("name ilike 'A%'", (Comparison("name", None, "ILIKE", "A%"),)),
        ("version_number >= 3", (Comparison("version_number", None, ">=", 3),)),
        ("version_number > -1", (Comparison("version_number", None, ">", -1),)),
        ("run_id IN ('a', 'b')", (Comparison("run_id", None, "IN", ("a", "b")),)),
        ("tags.team = 'x'", (Comparison("tag", "team", "=", "x"),)),
        ("tag.`my key.1` != 'x'", (Comparison("tag", "my key.1", "!=", "x"),)),
        ("tags.\"a.b\" = 'x'", (Comparison("tag", "a.b", "=", "x"),)),
        ("tags.mlflow.user = 'x'", (Comparison("tag", "mlflow.user", "=", "x"),)),
        (
            "name = 'a' and tag.`mlflow.prompt.is_prompt` != 'true'",
            (
                Comparison("name", None, "=", "a"),
                Comparison("tag", "mlflow.prompt.is_prompt", "!=", "true"),
            ),
        ),
        ("name = '''; DROP TABLE x; --'", (Comparison("name", None, "=", "'; DROP TABLE x; --"),)),
    ],
)
def test_a_filter_is_read_into_comparisons(text, expected):
    assert parse_filter(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("name", "name =", "= 'a'", "name = a", "name = 'a", "name 'a'", "name == 'a'"),
        *("name = 'a' OR 1=1", "name = 'a'; DROP TABLE registry_models", "name = 'a' --"),
        *("name = 'a' AND", "AND", "name IN 'a'", "name IN ()", "name IN ('a'", "tags. = 'a'"),
        *("name = 1.5", "(name = 'a')", "name = 'a' 'b'", "name = \x00", "1 = 1", "name BETWEEN 1"),
        " AND ".join(["name = 'a'"] * 21),
        "name IN (" + ",".join(["'a'"] * 501) + ")",
        "name = '" + "a" * 5000 + "'",
    ],
)
def test_what_is_no_filter_is_refused(text):
    with pytest.raises(InvalidInputError):
        parse_filter(text)


def test_an_ordering_names_fields_and_directions():
    assert parse_ordering(("name", "version_number DESC", "`source` asc")) == (
        Ordering("name", False),
        Ordering("version_number", True),
        Ordering("source", False),
    )


@pytest.mark.parametrize("clause", ["", "name UP", "name ASC DESC", "name; DROP TABLE x"])
def test_what_is_no_ordering_is_refused(clause):
    with pytest.raises(InvalidInputError):
        parse_ordering((clause,))
