"""Tables for people: no cell is cut off, and an identifier that people type stays one word."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """The console for tables.

    Outside a terminal lines are not folded, so that a long checksum stays one word.
    """
    return Console() if sys.stdout.isatty() else Console(width=10_000)


def table_of(*columns: str) -> Table:
    """An empty table with these columns; long cells are folded, not cut off."""
    table = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(table: Table, *identifiers: str, to: Console | None = None) -> None:
    """Print a table; the columns named `identifiers` are as wide as their longest cell."""
    for column in table.columns:
        if column.header in identifiers:
            column.min_width = max((len(str(cell)) for cell in column.cells), default=0)
    # In a narrow terminal a line is longer than the terminal; cutting it would cut an identifier.
    (to or console()).print(table, crop=False)
