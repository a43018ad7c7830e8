"""Which modules a spare may import before it is activated, found in the script's syntax without running it.

The early imports must not change what the script does. So a spare imports only heavy libraries that the
script itself imports, and nothing if the script writes to its environment, which libraries read on import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_HEAVY = ("torch", "numpy", "tensorforge")
_TRAINING = ("torch", "torch._dynamo", "tensorforge.train.loop.run")
"""The first optimizer imports `torch._dynamo`, which takes as long as all other imports together."""
_ENVIRONMENT = frozenset({"environ", "putenv", "environb", "unsetenv"})
_READERS = frozenset({"get", "copy", "items", "keys", "values"})


def preloads(source: str) -> tuple[str, ...]:
    """The modules that a spare may import for this script; none if that could change what the script does."""
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
    """The file that will run, if it can be found without importing anything."""
    if not as_module:
        return Path(script)
    base = Path(*script.split("."))
    candidates = (base.with_suffix(".py"), base / "__main__.py")
    return next((path for path in candidates if path.is_file()), None)


def _imports(tree: ast.Module) -> Iterator[str]:
    """The modules that the script imports at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _writes_environment(tree: ast.Module) -> bool:
    """Whether the script uses the environment for more than reading it."""
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
