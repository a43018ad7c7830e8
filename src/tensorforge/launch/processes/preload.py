"""What a spare worker may import before its turn comes: read from the script, never by running it.

A spare is a worker's process that waits. What it imports ahead must not change what the script does, so
only heavy libraries are taken that the script itself imports, and nothing at all if the script writes to its
environment: libraries read that when they are imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_HEAVY = ("torch", "numpy", "tensorforge")
_TRAINING = ("torch", "torch._dynamo", "tensorforge.train.loop.run")
"""`torch._dynamo` is imported by the first optimizer, and costs as much as all the rest."""
_ENVIRONMENT = frozenset({"environ", "putenv", "environb", "unsetenv"})
_READERS = frozenset({"get", "copy", "items", "keys", "values"})


def preloads(source: str) -> tuple[str, ...]:
    """The modules to import ahead for a script; none if that could make a difference."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    if _writes_environment(tree):
        return ()
    named = [name for name in _imports(tree) if name.partition(".")[0] in _HEAVY]
    ahead = _TRAINING if "tensorforge.train" in named else ()
    return tuple(dict.fromkeys([*ahead, *named]))


def find_script(script: str, *, as_module: bool) -> Path | None:
    """The file that will run, if that can be told without importing anything."""
    if not as_module:
        return Path(script)
    base = Path(*script.split("."))
    candidates = (base.with_suffix(".py"), base / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


def _imports(tree: ast.Module) -> Iterator[str]:
    """What is imported when the script starts: at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _writes_environment(tree: ast.Module) -> bool:
    """Whether the environment is used in any way but looking something up."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if name in _ENVIRONMENT and not _only_reads(node, parents.get(node)):
            return True
    return False


def _only_reads(node: ast.AST, parent: ast.AST | None) -> bool:
    if isinstance(parent, ast.Attribute):
        return parent.attr in _READERS
    if isinstance(parent, ast.Subscript):
        return parent.value is node and isinstance(parent.ctx, ast.Load)
    return isinstance(parent, ast.Compare)
