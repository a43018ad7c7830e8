"""Statements that are compiled once and then go to the database's driver as they are.

Executing a statement through SQLAlchemy costs several times what SQLite needs to run it. The statements of a
hot path are therefore built and compiled once; what remains per call is the driver's own work.
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
    """A statement in one database's own words. `order` is `None` where parameters go by name."""

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
    """A statement with bound parameters, whose rows come back as plain dictionaries.

    `statement` is the statement, or makes it from the name of the database's dialect. An insert names its
    `columns`, all of which the caller gives: there are no defaults. Values pass the driver unconverted, so a
    statement that reads booleans from SQLite, which has none, must not be prepared.
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
        """Execute a statement that has no rows."""
        compiled = self._for(connection.dialect)
        cursor = connection.connection.cursor()
        try:
            cursor.execute(compiled.text, compiled.arguments(parameters))
        finally:
            cursor.close()

    def fetch(
        self, connection: Any, dialect: sa.Dialect, parameters: Mapping[str, Any]
    ) -> list[Row]:
        """Like `all`, on a connection of the driver."""
        compiled = self._for(dialect)
        cursor = connection.cursor()
        try:
            cursor.execute(compiled.text, compiled.arguments(parameters))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=False)) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def _for(self, dialect: sa.Dialect) -> _Compiled:
        # Threads that meet here compile the same thing twice; either result will do.
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
        assert isinstance(compiled, SQLCompiler)  # noqa: S101  only such statements are prepared
        if compiled.post_compile_params or compiled.literal_execute_params:
            raise InvalidInputError(f"{compiled} is not complete before it has its values")
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        return _Compiled(str(compiled), constants, compiled.positiontup)
