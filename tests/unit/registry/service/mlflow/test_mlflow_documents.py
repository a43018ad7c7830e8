"""What the database writes about a version is what the service writes about it, whatever it contains."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.registry.sample_values import S, bring, metadata

from tensorforge.registry import Lineage, ModelRegistry
from tensorforge.registry.service.mlflow.mlflow_documents import VERSION_DOCUMENT
from tensorforge.registry.service.mlflow.mlflow_wire import STATE_TAG, VERSION_TAG, version_body

NASTY = "\"quoted\" \\ back\\slash\n\r\t\b\x01\x1b\x7f\u2028 '' %s %d {0} ,\n é 漢 \U0001f600 null"


def documents(registry, text="", **options):
    found, token = registry.search_version_documents(VERSION_DOCUMENT, text, **options)
    return json.loads(f"[{found}]"), token


def bodies(registry, text="", **options):
    page = registry.search_versions(text, **options)
    return [json.loads(json.dumps(version_body(each))) for each in page.items], page.next_token


def test_every_kind_of_text_survives(stored):
    lineage = Lineage(run_id=NASTY, step=3, run_link=NASTY)
    tags = {"b": NASTY, "a": "", "Z/ä": "1"}
    stored.register(metadata(tags=tags, source=NASTY, description=NASTY, lineage=lineage))
    stored.register(metadata("1.1.0"))
    for alias in ("zoo", "champion"):
        stored.set_alias("ranker", alias, stored.get_by_number("ranker", 1).version)
    assert documents(stored) == bodies(stored)
    (_, nasty), _ = documents(stored)
    assert nasty["description"] == NASTY
    assert nasty["aliases"] == ["champion", "zoo"]
    assert [tag["key"] for tag in nasty["tags"]] == ["Z/ä", "a", "b", VERSION_TAG, STATE_TAG]


def test_tags_that_pose_as_ours_are_not_shown(stored):
    stored.register(metadata(tags={VERSION_TAG: "9.9.9", STATE_TAG: "archived", "z": "1"}))
    (shown,), _ = documents(stored)
    pairs = [(tag["key"], tag["value"]) for tag in shown["tags"]]
    assert pairs == [("z", "1"), (VERSION_TAG, "1.0.0"), (STATE_TAG, "registered")]


def test_every_state_has_its_stage(stored):
    for number, state in enumerate(S):
        version = f"1.{number}.0"
        stored.register(metadata(version))
        bring(stored, version, state)
    assert documents(stored) == bodies(stored)


ORDERS = [[], ["name"], ["version_number ASC", "name DESC"], ["source DESC"], ["name", "run_id"]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("text", ["", "tags.n = 'x'", "name LIKE 'm%'", "name = 'nobody'"])
def test_pages_are_those_of_the_same_search_for_values(stored, order, text):
    for number in range(7):
        odd = "x" if number % 2 else 'y"\n,'
        stored.register(
            metadata(f"1.{number}.0", f"m{number % 2}", tags={"n": odd}, source=odd + NASTY)
        )
    token, pages = None, 0
    while True:
        options = {"order_by": order, "limit": 2, "token": token}
        found = documents(stored, text, **options)
        assert found == bodies(stored, text, **options)
        pages, token = pages + 1, found[1]
        if token is None:
            break
    assert pages == {"": 4, "tags.n = 'x'": 2, "name LIKE 'm%'": 4}.get(text, 1)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00\x1e\x1f"))


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS, min_size=4, max_size=4), limit=st.integers(1, 3))
def test_any_text_is_written_alike(texts, limit):
    with ModelRegistry() as registry:
        for number, text in enumerate(texts):
            registry.register(
                metadata(f"1.{number}.0", tags={"n": text}, source=text, description=text)
            )
        assert documents(registry, limit=limit) == bodies(registry, limit=limit)
        assert documents(registry, order_by=["source"], limit=limit) == bodies(
            registry, order_by=["source"], limit=limit
        )
