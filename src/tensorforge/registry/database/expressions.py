"""SQL functions over texts that the two databases spell differently."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


def constant(text: str) -> sa.ColumnElement[str]:
    """A text of our own, which stands in the statement itself: the database need not look it up per row."""
    quoted = text.replace("'", "''")
    return sa.literal_column(f"'{quoted}'", sa.Text)


class Joined(FunctionElement[str]):
    """The texts of all rows with a separator between them: `Joined(text, separator)`.

    A third argument is what PostgreSQL sorts the rows by. SQLite takes them as it finds them: those that one
    key of a table without row numbers selects come in the order of the rest of the key.
    """

    name = "joined"
    type = sa.Text()
    inherit_cache = True


@compiles(Joined)
def _joined(element: Joined, compiler: SQLCompiler, **options: Any) -> str:
    text, separator, *by = (compiler.process(each, **options) for each in element.clauses)
    if compiler.dialect.name == "sqlite":
        return f"group_concat({text}, {separator})"
    order = f" ORDER BY {by[0]}" if by else ""
    return f"string_agg({text}, {separator}{order})"


class Quoted(FunctionElement[str]):
    """A text as a string of JSON, quotes included."""

    name = "quoted"
    type = sa.Text()
    inherit_cache = True


@compiles(Quoted)
def _quoted(element: Quoted, compiler: SQLCompiler, **options: Any) -> str:
    text = compiler.process(element.clauses, **options)
    if compiler.dialect.name == "sqlite":
        return f"json_quote({text})"
    return f"CAST(to_json({text}) AS TEXT)"


class ObjectOf(FunctionElement[str]):
    """A JSON object as a text: `ObjectOf(key, value, key, value, ...)`."""

    name = "object_of"
    type = sa.Text()
    inherit_cache = True


@compiles(ObjectOf)
def _object_of(element: ObjectOf, compiler: SQLCompiler, **options: Any) -> str:
    pairs = compiler.process(element.clauses, **options)
    if compiler.dialect.name == "sqlite":
        return f"json_object({pairs})"
    return f"CAST(json_build_object({pairs}) AS TEXT)"


class Filled(FunctionElement[str]):
    """A template whose `%s` are replaced by the other arguments; nothing stands for a NULL."""

    name = "filled"
    type = sa.Text()
    inherit_cache = True


@compiles(Filled)
def _filled(element: Filled, compiler: SQLCompiler, **options: Any) -> str:
    function = "printf" if compiler.dialect.name == "sqlite" else "format"
    return f"{function}({compiler.process(element.clauses, **options)})"
