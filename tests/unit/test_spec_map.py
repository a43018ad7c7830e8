"""Every Python name in docs/spec-map.md exists."""

import dataclasses
import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "spec-map.md"
NAMES = sorted(set(re.findall(r"`(tensorforge\.[\w.]+)`", PAGE.read_text())))


def resolve(name):
    module, _, rest = name.rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        owner = resolve(module)
    if dataclasses.is_dataclass(owner) and rest in {f.name for f in dataclasses.fields(owner)}:
        return owner
    return getattr(owner, rest)


def exists(name):
    try:
        return resolve(name) is not None
    except (AttributeError, ModuleNotFoundError):
        return False


def test_every_name_on_the_page_exists():
    assert len(NAMES) > 50
    assert [name for name in NAMES if not exists(name)] == []
