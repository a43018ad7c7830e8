"""The variables of the environment: one table, typed, and nobody reads past it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tensorforge
from tensorforge import environment
from tensorforge.environment import VARIABLES
from tensorforge.errors import ConfigurationError

SOURCE = Path(tensorforge.__file__).parent
PROJECT = SOURCE.parent.parent
NAME = re.compile(r"TENSORFORGE_[A-Z][A-Z_]*")


def test_no_other_module_names_a_variable():
    naming = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if NAME.search(path.read_text(encoding="utf-8"))
    }
    assert naming == {"environment.py"}


def test_every_variable_that_the_project_speaks_of_is_in_the_table():
    folders = ("tests", "benchmarks", "examples", "docs", "tools")
    files = [p for f in folders for p in (PROJECT / f).rglob("*") if p.suffix in (".py", ".md")]
    files += [PROJECT / "Makefile", PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]
    known = {variable.name for variable in VARIABLES}
    for path in files:
        assert set(NAME.findall(path.read_text(encoding="utf-8"))) <= known, path


def test_names_are_unique_and_every_variable_is_explained():
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES) > 15
    for variable in VARIABLES:
        assert NAME.fullmatch(variable.name)
        assert variable.meaning.endswith(".")
        is_always_set = variable is environment.COORDINATOR_SETTINGS
        assert is_always_set or bool(variable.otherwise) != (variable.default is not None)


def test_a_variable_that_is_not_set_or_is_empty_has_its_default():
    assert environment.RUN_DIR.read({}) is None
    assert environment.RUN_DIR.read({"TENSORFORGE_RUN_DIR": ""}) is None
    assert environment.STORE.read({}) == "./checkpoints"


def test_a_value_has_its_type():
    given = {
        "TENSORFORGE_RUN_DIR": "/runs/a",
        "TENSORFORGE_REPORT_FD": "7",
        "TENSORFORGE_PRELOAD": "torch,numpy",
        "TENSORFORGE_CONFIG": '{"a": 1}',
        "TENSORFORGE_SOAK": "1",
        "TENSORFORGE_COORDINATOR": "[::1]:80",
    }
    assert environment.RUN_DIR.read(given) == Path("/runs/a")
    assert environment.REPORT_FD.read(given) == 7
    assert environment.PRELOAD.read(given) == ("torch", "numpy")
    assert environment.CONFIG.read(given) == {"a": 1}
    assert environment.SOAK.read(given) is True
    assert environment.COORDINATOR.read(given) == "[::1]:80"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (environment.COORDINATOR, "host"),
        (environment.COORDINATOR, ":80"),
        (environment.COORDINATOR, "host:port"),
        (environment.REPORT_FD, "-1"),
        (environment.REPORT_FD, "seven"),
        (environment.CONFIG, "{"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_variable(variable, text):
    with pytest.raises(ConfigurationError, match=f"{variable.name} = .*: must be"):
        variable.read({variable.name: text})


def test_what_is_taken_is_gone(monkeypatch):
    monkeypatch.setenv("TENSORFORGE_ACTIVATION_FD", "5")
    assert environment.ACTIVATION_FD.take() == 5
    assert environment.ACTIVATION_FD.take() is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (environment.RUN_DIR, Path("/runs/a")),
        (environment.REPORT_FD, 7),
        (environment.PRELOAD, ("torch", "numpy")),
        (environment.CONFIG, {"a": [1, None]}),
        (environment.SOAK, True),
        (environment.TOKEN, "tf_x"),
    ],
)
def test_a_child_reads_what_its_parent_told(variable, value):
    told = environment.for_child({variable: value, environment.HOST: None})
    assert list(told) == [variable.name]
    assert variable.read(told) == value
