"""Prepared statements: compiled once by SQLAlchemy, then executed by the database's driver.

Executing a statement through SQLAlchemy costs several times what SQLite needs to run it. So the statements
of hot paths are compiled once, and each call costs only the driver's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.sql.compiler import SQLCompiler

from tensorforge.errors import InvalidInputError

Row = Mapping[Any, Any]
Statement = sa.Executable | Callable[[str], sa.Executable]


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A statement in one database's dialect. `order` is `None` if parameters are passed by name."""

    text: str
    constants: Mapping[str, Any]
    order: Sequence[str] | None

    def arguments(self, parameters: Mapping[str, Any]) -> Any:
        if self.order is None:
            return {**self.constants, **parameters}
        if not self.constants:
            return [parameters[name] for name in self.order]
        return [
            parameters[name] if name in parameters else self.constants[name] for name in self.order
        ]


class Prepared:
    """A statement with bound parameters; rows are returned as plain dictionaries.

    `statement` is the statement, or a function that makes it from the name of the dialect. An insert names
    its `columns`, and the caller passes a value for each: there are no defaults. Values are not converted,
    so a statement that reads booleans from SQLite, which stores numbers, must not be prepared.
    """

    def __init__(self, statement: Statement, *, columns: Sequence[str] | None = None) -> None:
        self._statement = statement
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, _Compiled] = {}

    def all(self, connection: sa.Connection, parameters: Mapping[str, Any]) -> list[Row]:
        """Every row of the result."""
        return self.fetch(connection.connection, connection.dialect, parameters)

    def first(self, connection: sa.Connection, parameters: Mapping[str, Any]) -> Row | None:
        """The first row of the result, or `None`."""
        rows = self.all(connection, parameters)
        return rows[0] if rows else None

    def run(self, connection: sa.Connection, parameters: Mapping[str, Any]) -> None:
        """Execute a statement that returns no rows."""
        compiled = self._for(connection.dialect)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(compiled.text, compiled.arguments(parameters))
        finally:
            cursor.close()

    def fetch(
        self, connection: Any, dialect: sa.Dialect, parameters: Mapping[str, Any]
    ) -> list[Row]:
        """Like `all`, on a connection of the database's driver."""
        compiled = self._for(dialect)
        cursor = connection.cursor()
        try:
            cursor.execute(compiled.text, compiled.arguments(parameters))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=False)) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def _for(self, dialect: sa.Dialect) -> _Compiled:
        # Two threads may compile the same statement at once; both results are equal.
        compiled = self._compiled.get(dialect.name)
        if compiled is None:
            compiled = self._compiled[dialect.name] = self._compile(dialect)
        return compiled

    def _compile(self, dialect: sa.Dialect) -> _Compiled:
        made = self._statement
        statement = made if isinstance(made, sa.Executable) else made(dialect.name)
        compiled = cast("sa.ClauseElement", statement).compile(
            dialect=dialect, column_keys=self._columns
        )
        assert isinstance(compiled, SQLCompiler)  # noqa: S101  every prepared statement compiles to SQL
        if compiled.post_compile_params or compiled.literal_execute_params:
            raise InvalidInputError(
                f"{compiled} cannot be prepared: its text depends on its values"
            )
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        return _Compiled(str(compiled), constants, compiled.positiontup)
