"""SQL that SQLite and PostgreSQL spell differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from tensorforge.storage.prepared import Prepared


def constant(text: str) -> sa.ColumnElement[str]:
    """A text that stands in the statement itself, so that the database need not look up a parameter per row."""
    quoted = text.replace("'", "''")
    return sa.literal_column(f"'{quoted}'", sa.Text)


class Joined(FunctionElement[str]):
    """The texts of all rows with a separator between them: `Joined(text, separator)`.

    PostgreSQL sorts the rows by the third argument, if there is one. SQLite joins them in the order in which it
    reads them: in a table without row numbers, the rows of one owner are read in the order of the rest of the
    key.
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


class _TextFunction(FunctionElement[str]):
    """A function that returns a text.

    Each subclass has one template per database, with `{}` for the arguments.
    """

    name = "text_function"
    type = sa.Text()
    inherit_cache = True
    in_sqlite: str
    in_postgresql: str


@compiles(_TextFunction)
def _text_function(element: _TextFunction, compiler: SQLCompiler, **options: Any) -> str:
    is_sqlite = compiler.dialect.name == "sqlite"
    template = element.in_sqlite if is_sqlite else element.in_postgresql
    return template.format(compiler.process(element.clauses, **options))


class JsonString(_TextFunction):
    """A text as a JSON string, quotes included."""

    inherit_cache = True
    in_sqlite, in_postgresql = "json_quote({})", "CAST(to_json({}) AS TEXT)"


class JsonObject(_TextFunction):
    """A JSON object as a text: `JsonObject(key, value, key, value, ...)`."""

    inherit_cache = True
    in_sqlite, in_postgresql = "json_object({})", "CAST(json_build_object({}) AS TEXT)"


class Formatted(_TextFunction):
    """A template whose `%s` are replaced by the other arguments; NULL is replaced by an empty text."""

    inherit_cache = True
    in_sqlite, in_postgresql = "printf({})", "format({})"


def insert_if_absent(table: sa.Table, columns: Sequence[str]) -> Prepared:
    """A statement that inserts a row unless one with the same key exists, and returns the inserted row.

    If another transaction is inserting the same key, the statement waits until that transaction ends.
    """

    def statement(dialect: str) -> sa.Executable:
        insert: Any = (sqlite if dialect == "sqlite" else postgresql).insert(table)
        return insert.on_conflict_do_nothing().returning(*table.columns)  # type: ignore[no-any-return]  # the two dialects share no type for it

    return Prepared(statement, columns=columns)
