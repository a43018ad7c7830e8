import pytest

from tensorforge.errors import InvalidInputError
from tensorforge.registry.domain.names import check_alias, check_name, check_tags, check_text


@pytest.mark.parametrize(
    "name",
    [
        *(
            "m",
            "my-model_1.2",
            "with space",
            "Größe",
            "模型",
            "a" * 256,
            "a+b",
            "[team] x",
            "a@b",
            ".a",
        ),
        *("a%2fb", "a;b", "a'b", 'a"b', "<b>", "a.", "{x}", "a?b", "a#b", "~root", "$HOME"),
    ],
)
def test_a_name_that_means_only_itself_is_accepted(name):
    assert check_name("model_id", name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "a:b", "a\x00b"),
        *("a\nb", "a\u202eb", " a", "a ", "\ud800", "e\u0301", "a" * 257, "a" * 1_000_000),
    ],
)
def test_a_name_that_could_mean_something_else_is_refused(name):
    with pytest.raises(InvalidInputError, match="model_id"):
        check_name("model_id", name)


@pytest.mark.parametrize("value", [None, 1, b"a", ["a"], {}])
def test_a_name_must_be_a_text(value):
    with pytest.raises(InvalidInputError, match="must be a text"):
        check_name("model_id", value)


def test_a_huge_name_is_not_repeated_in_the_message():
    with pytest.raises(InvalidInputError) as caught:
        check_name("model_id", "/" * 199)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("alias", ["champion", "Prod-eu_1", "a", "production", "staging", "None"])
def test_an_alias_is_a_word(alias):
    assert check_alias(alias) == alias


@pytest.mark.parametrize(
    "alias", ["", "latest", "LATEST", "v1", "V22", "1", "1.2.3", "x", "a b", "a/b"]
)
def test_an_alias_that_could_be_a_version_is_refused(alias):
    with pytest.raises(InvalidInputError, match="alias"):
        check_alias(alias)


def test_tags_keep_any_text_as_value():
    tags = {"team/owner": "a\nb", "mlflow.user": "", "k:1 x": "ü" * 100_000}
    assert check_tags(tags) == tags


@pytest.mark.parametrize(
    "tags",
    [
        {"": "v"},
        {"../k": "v"},
        {"a/../b": "v"},
        {"/abs": "v"},
        {"a//b": "v"},
        {"k\x00": "v"},
        {"k'; DROP TABLE": "v"},
        {"k" * 251: "v"},
        {"k": "v" * 100_001},
        {"k": "a\x00b"},
        {"k": "a\x1eb"},
        {"k": "\udfff"},
        {"k": 1},
        {"k": None},
        {1: "v"},
        {f"k{i}": "v" for i in range(201)},
        ["k"],
    ],
)
def test_tags_that_cannot_be_kept_are_refused(tags):
    with pytest.raises(InvalidInputError):
        check_tags(tags)


def test_a_text_may_be_empty_unless_it_is_required():
    assert check_text("reason", "") == ""
    with pytest.raises(InvalidInputError, match="must not be empty"):
        check_text("reason", "", required=True)
