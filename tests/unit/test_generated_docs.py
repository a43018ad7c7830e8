"""What is made from the code is current: two pages, a picture, and the tree in `tensorforge.errors`."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tensorforge import errors
from tensorforge.errors import TensorForgeError

PROJECT = Path(__file__).parents[2]
DOCS = PROJECT / "docs"


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "tools"))
    return importlib.import_module


GENERATED = ["environment.md", "errors.md", "adr/README.md", "architecture.svg"]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_file_is_current(tools, name):
    pages = tools("generate_docs").PAGES
    assert set(pages) == set(GENERATED)
    current = (DOCS / name).read_text(encoding="utf-8")
    assert current == pages[name](), "run `make docs`"


def test_every_decision_is_in_the_index_and_said_in_one_line():
    index = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| \[.+\]\((.+)\) \| (.+) \| (.*) \|$", index, re.MULTILINE)
    files = {path.name for path in (DOCS / "adr").glob("0*.md")}
    assert {name for _, name, _, _ in rows} == files
    numbers = {number for number, _, _, _ in rows}
    for number, _, status, line in rows:
        assert status == "accepted" or status.removeprefix("superseded by ") in numbers, number
        assert line.endswith("."), number


def test_the_picture_has_a_box_for_every_package():
    picture = ET.parse(DOCS / "architecture.svg")
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    packages = {path.parent.name for path in (PROJECT / "src/tensorforge").glob("*/__init__.py")}
    assert packages - {"testing"} <= texts


def test_arrows_that_follow_from_others_are_left_out(tools):
    reduced = tools("draw_architecture")._reduced
    assert reduced({("a", "b"), ("b", "c"), ("a", "c")}) == (("a", "b"), ("b", "c"))


def test_the_tree_of_errors_is_drawn_as_the_classes_are():
    drawn = {}
    above = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+)(  |$)", line)
        if found:
            depth = len(found[1]) // 4
            above = [*above[:depth], found[2]]
            drawn[found[2]] = above[-2] if depth else None
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    classes = {
        kind.__name__: next((b.__name__ for b in kind.__bases__ if b in kinds), None)
        for kind in kinds
        if issubclass(kind, TensorForgeError)
    }
    assert drawn == classes
