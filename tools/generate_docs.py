"""Writes the pages and the picture that are made from the code: `make docs`. A test keeps them current."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from draw_architecture import draw, read_architecture
from tensorforge import environment, errors
from tensorforge.environment import Reader, Variable
from tensorforge.errors import TensorForgeError

DOCS = Path(__file__).parents[1] / "docs"

NOTE = "<!-- Made from src/tensorforge/{} by `make docs`. Change it there. -->"
READERS = {
    Reader.USER: ("Read by the commands", "An option on the command line wins over its variable."),
    Reader.WORKER: (
        "Read by a worker",
        "The launcher and `tensorforge worker` set them for the script. Set them to start it otherwise.",
    ),
    Reader.CHILD: (
        "Between the launcher and its processes",
        "The launcher sets them, and the process removes them from its environment as it reads them.",
    ),
    Reader.TESTS: ("Read by the project's own tests", "They change how long the tests run."),
}


def environment_page() -> str:
    """docs/environment.md: every variable in a table, by who reads it."""
    lines = [
        "# Environment variables",
        "",
        NOTE.format("environment.py"),
        "",
        "An empty value counts as not set. A value of another type is an error that names the variable.",
    ]
    for reader, (title, text) in READERS.items():
        lines += [
            "",
            f"## {title}",
            "",
            text,
            "",
            "| variable | type | meaning | if it is not set |",
        ]
        lines.append("|---|---|---|---|")
        lines += [_row(variable) for variable in environment.VARIABLES if variable.reader is reader]
    return "\n".join(lines) + "\n"


def _row(variable: Variable) -> str:
    default = variable.default
    otherwise = variable.otherwise if default is None else f"`{variable.kind.format(default) or 0}`"
    return f"| `{variable.name}` | {variable.kind.name} | {variable.meaning} | {otherwise or 'an error'} |"


def errors_page() -> str:
    """docs/errors.md: the tree of errors, and what each carries."""
    tree = [line.strip() for line in (errors.__doc__ or "").splitlines() if line.startswith("    ")]
    lines = [
        "# Errors",
        "",
        NOTE.format("errors.py"),
        "",
        "Every error that TensorForge raises on purpose is a `TensorForgeError` from `tensorforge.errors`.",
        "A message says what happened, to what, what was expected and what to do. Errors of libraries are",
        "translated where they arise, and are the `__cause__` of ours.",
        "",
        "```",
        *tree,
        "```",
        "",
        "| error | meaning | is also | carries | try again? |",
        "|---|---|---|---|---|",
        *[_error_row(kind) for kind in _kinds(TensorForgeError)],
    ]
    return "\n".join(lines) + "\n"


def _kinds(kind: type[TensorForgeError]) -> list[type[TensorForgeError]]:
    """The error and those below it in `tensorforge.errors`, in the order of their definition."""
    known = [error for error in vars(errors).values() if isinstance(error, type)]
    below = [error for error in known if kind in error.__bases__]
    return [kind, *(found for error in below for found in _kinds(error))]


def _error_row(kind: type[TensorForgeError]) -> str:
    meaning = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    others = [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]
    common = {"Exception", "BaseException", "object"}
    also = ", ".join(f"`{name}`" for name in others if name not in common)
    carries = ", ".join(f"`{name}`" for name in _attributes(kind))
    again = "yes" if kind.retryable else "no"
    return f"| `{kind.__name__}` | {meaning} | {also} | {carries} | {again} |"


def _attributes(kind: type[TensorForgeError]) -> list[str]:
    if "__init__" not in vars(kind):
        return []
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    return [name for name in names if name != "message"]


def decisions_page() -> str:
    """docs/adr/README.md: number, title and status of every decision, and the line that the page has for it."""
    page = DOCS / "adr" / "README.md"
    told = dict(
        re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    )
    lines = [
        "# Decisions",
        "",
        "Each decision that a newcomer would question has half a page. Numbers go by subject: up to 9 the",
        "project, 10 memory, 20 checkpoints, 30 catalog and storage, 40 control plane, 50 data, 60 training,",
        "70 registry, 80 and 90 launching.",
        "",
        "<!-- `make docs` writes all columns but the last, which is kept. -->",
        "",
        "| | decision | status | in one line |",
        "|---|---|---|---|",
    ]
    for path in sorted(page.parent.glob("0*.md")):
        number, title, text = _decision(path)
        replaced = re.search(r"^Superseded by \[ADR (\d+)\]", text, re.MULTILINE)
        status = f"superseded by {replaced[1]}" if replaced else "accepted"
        lines.append(f"| {number} | [{title}]({path.name}) | {status} | {told.get(number, '')} |")
    return "\n".join(lines) + "\n"


def _decision(path: Path) -> tuple[str, str, str]:
    heading, _, text = path.read_text(encoding="utf-8").partition("\n")
    found = re.fullmatch(r"# 0*(\d+)[.:] (.+)", heading)
    if found is None or int(path.name[:4]) != int(found[1]):
        raise SystemExit(f"{path}: begins with {heading!r}, not with its number and a title")
    return found[1], found[2], text


PAGES: dict[str, Callable[[], str]] = {
    "environment.md": environment_page,
    "errors.md": errors_page,
    "adr/README.md": decisions_page,
    "architecture.svg": lambda: draw(read_architecture()),
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
