"""The rules of the house: small folders, one meaning per file name, docstrings, tests beside sources."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import tensorforge

SOURCE = Path(tensorforge.__file__).parent
PROJECT = SOURCE.parent.parent
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))

MOST_MODULES = 14
LARGER_FOLDERS = {
    "cli": "one file per command",
    "launch/supervisor": "the parts of one decision",
    "testing": "one file per aid for tests",
}
SAME_MEANING = {
    "instructions.py": "what a pure machine tells the shell around it to do",
}
BY_COMMAND = Path("cli")
"""The files here are named by their command, whatever other files are called."""
SAYS_NOTHING = {"utils.py", "helpers.py", "common.py", "misc.py", "base.py"}


def modules_by_folder():
    folders = defaultdict(list)
    for path in FILES:
        if path.name != "__init__.py":
            folders[path.parent.as_posix()].append(path.name)
    return folders


def test_a_folder_has_at_most_about_a_dozen_modules():
    large = {name for name, modules in modules_by_folder().items() if len(modules) > MOST_MODULES}
    assert large == set(LARGER_FOLDERS)


def test_a_file_name_means_one_thing():
    places = defaultdict(list)
    for path in FILES:
        if path.name != "__init__.py" and path.parent != BY_COMMAND:
            places[path.name].append(path.as_posix())
    assert {name for name, paths in places.items() if len(paths) > 1} == set(SAME_MEANING)
    assert not SAYS_NOTHING & set(places)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_module_says_what_it_is_for(path):
    docstring = ast.get_docstring(ast.parse((SOURCE / path).read_text(encoding="utf-8")))
    assert docstring
    assert docstring.split("\n\n")[0].endswith((".", ":", "?"))


def test_every_folder_of_sources_is_a_package():
    folders = {path.parent for path in FILES}
    assert [folder for folder in folders if not (SOURCE / folder / "__init__.py").exists()] == []


def test_unit_tests_lie_where_their_sources_lie():
    tests = PROJECT / "tests" / "unit"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    missing = [f for f in folders if not (SOURCE / f).is_dir() and not (PROJECT / f).is_dir()]
    assert missing == []
