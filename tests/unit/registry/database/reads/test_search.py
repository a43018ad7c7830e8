import base64
import json

import pytest
from tests.unit.registry.sample_values import S, bring, metadata, v

from tensorforge.errors import InvalidInputError
from tensorforge.registry import ModelRegistry, parse_range


@pytest.fixture
def full(registry):
    return fill(registry)


def fill(registry):
    for number in range(12):
        team = "search" if number % 3 == 0 else "ads"
        model = "ranker" if number % 2 == 0 else "Sorter_x"
        tags = {"team": team, "n": str(number)}
        registry.register(metadata(f"1.{number}.0", model, tags=tags, source=f"s3://b/{number}"))
    return registry


def found(registry, text, **options):
    return [str(m.version) for m in registry.search_versions(text, **options).items]


def test_the_newest_come_first_unless_ordered_otherwise(full):
    assert found(full, "")[:2] == ["1.11.0", "1.10.0"]
    assert found(full, "", order_by=["version_number ASC", "name DESC"])[:2] == ["1.0.0", "1.1.0"]
    assert found(full, "", order_by=["name"])[0] in ("1.1.0", "1.0.0")


CASES = [
    ("name = 'ranker' AND tags.team = 'search'", ["1.6.0", "1.0.0"]),
    ("tags.team = 'search' AND tags.n = '9'", ["1.9.0"]),
    ("tag.n IN ('1', '2')", ["1.2.0", "1.1.0"]),
    ("tags.team != 'ads' AND name = 'ranker'", ["1.6.0", "1.0.0"]),
    ("tags.absent != 'x' AND version_number > 5", []),
    ("tags.absent = 'x'", []),
    ("name LIKE 'Sort%' AND version_number = 1", ["1.1.0"]),
    ("name LIKE 'sort%'", []),
    ("name ILIKE 'sort%' AND version_number = 1", ["1.1.0"]),
    ("name LIKE '_anker' AND version_number <= 1", ["1.0.0"]),
    ("source_path = 's3://b/4'", ["1.4.0"]),
    ("source_path LIKE '%*%'", []),
    ("state = 'registered' AND version_number >= 6", ["1.11.0", "1.10.0"]),
    ("state IN ('canary')", []),
    ("name = 'x'' OR 1=1 --'", []),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_filters_select(full, text, expected):
    assert found(full, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "secret_hash = 'x'",
        "name = 1",
        "version_number = 'x'",
        "version_number LIKE '1%'",
        "version_number = 99999999999999999999",
        "tags.n = 1",
        "name = 'a' OR name = 'b'",
        "name = 'a'; DROP TABLE registry_models",
    ],
)
def test_a_filter_that_cannot_work_is_refused_and_harms_nothing(full, text):
    with pytest.raises(InvalidInputError):
        full.search_versions(text)
    assert full.version_count() == 12


ORDERS = [(), ("name",), ("version_number DESC", "name"), ("source DESC",)]


def pages_of(registry, order, size):
    pages, token = [], None
    while True:
        page = registry.search_versions("", order_by=order, limit=size, token=token)
        pages += [str(m.version) for m in page.items]
        token = page.next_token
        if token is None:
            return pages


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 5, 12])
def test_pages_cover_everything_once_in_the_same_order(full, order, size):
    whole = found(full, "", order_by=order)
    pages = pages_of(full, order, size)
    assert pages == whole
    assert len(set(pages)) == 12


@pytest.mark.parametrize("order", ORDERS)
def test_pages_of_a_search_by_tags_cover_everything_once(full, order):
    text = "tags.team = 'ads' AND tags.n != '1'"
    whole = found(full, text, order_by=order)
    pages, token = [], None
    while True:
        page = full.search_versions(text, order_by=order, limit=3, token=token)
        pages += [str(m.version) for m in page.items]
        token = page.next_token
        if token is None:
            break
    assert pages == whole
    assert len(whole) == 7


def test_postgres_finds_the_same(postgres_url):
    with ModelRegistry(postgres_url) as registry:
        fill(registry)
        for text, expected in CASES:
            assert found(registry, text) == expected, text
        for order in ORDERS:
            assert pages_of(registry, order, 5) == found(registry, "", order_by=order)


def test_a_page_is_not_disturbed_by_what_comes_meanwhile(full):
    page = full.search_versions("", limit=4)
    full.register(metadata("9.0.0"))
    full.delete_version("ranker", v("1.8.0"))
    rest = full.search_versions("", limit=100, token=page.next_token)
    seen = [str(m.version) for m in (*page.items, *rest.items)]
    assert sorted(seen) == sorted(f"1.{n}.0" for n in range(12))


def forged(values):
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def test_a_page_token_of_another_search_or_maker_is_refused(full):
    token = full.search_versions("name = 'ranker'", limit=1).next_token
    identity = json.loads(base64.urlsafe_b64decode(token))[0]
    bad = [
        *("x", "%%%", "e30=", forged([]), forged(["x", [1]]), forged([identity, 5])),
        forged([identity, ["1"]]),
        forged([identity, [1, 2]]),
        forged([identity, [2**70]]),
        forged([identity, [True]]),
    ]
    for each in bad:
        with pytest.raises(InvalidInputError):
            full.search_versions("name = 'ranker'", limit=1, token=each)
    with pytest.raises(InvalidInputError, match="another search"):
        full.search_versions("name = 'Sorter_x'", limit=1, token=token)


@pytest.mark.parametrize("limit", [0, -1, 10_001, True, "5"])
def test_a_page_has_a_sensible_size(full, limit):
    with pytest.raises(InvalidInputError, match="a page must have"):
        full.search_versions("", limit=limit)


def test_versions_of_one_model_within_a_range(full):
    bring(full, "1.4.0", S.STAGING)
    page = full.search_versions(model_id="ranker", versions=parse_range(">=1.2 <1.8"))
    assert [str(m.version) for m in page.items] == ["1.6.0", "1.4.0", "1.2.0"]


def test_models_are_searched_by_name_and_tag(full):
    full.set_tags("ranker", put={"mlflow.prompt.is_prompt": "true"})
    full.create_model("empty")
    names = [m.model_id for m in full.search_models("").items]
    assert sorted(names) == ["Sorter_x", "empty", "ranker"]
    full.set_tags("empty", put={"team": "ads"})
    page = full.search_models("tag.team != 'search'", order_by=["name DESC"])
    assert {m.model_id for m in page.items} == {"empty"}, "a model without the tag does not match"
    first = full.search_models("", limit=2)
    rest = full.search_models("", limit=2, token=first.next_token)
    assert [m.model_id for m in (*first.items, *rest.items)] == names
