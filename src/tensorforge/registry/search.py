"""Searches by filter, page by page.

Pages are found by key, not by counting: a page costs the same wherever it lies, and what is registered
or removed meanwhile neither repeats nor hides anything else. Every value of a caller reaches the
database as a bound parameter.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from tensorforge.errors import InvalidInputError
from tensorforge.registry.filters import (
    Comparison,
    Literal,
    Ordering,
    parse_filter,
    parse_ordering,
)
from tensorforge.registry.names import check_text, tag_digest
from tensorforge.registry.rows import MODEL_QUERY, VERSION_QUERY, Row
from tensorforge.registry.schema import MODEL_TAGS, MODELS, VERSION_TAGS, VERSIONS

MAX_PAGE = 10_000
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some results, and the token that fetches the ones after them (`None` at the end)."""

    items: tuple[Item, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class Searchable:
    """A kind of thing that can be searched: how it is read, compared and sorted."""

    query: sa.Select[Any]
    key: sa.Column[Any]
    fields: Mapping[str, sa.Column[Any]]
    tags: sa.Table
    owner: str
    default: tuple[Ordering, ...]


VERSION_SEARCH = Searchable(
    query=VERSION_QUERY,
    key=VERSIONS.c.key,
    fields={
        "name": MODELS.c.model_id,
        "model_id": MODELS.c.model_id,
        "run_id": VERSIONS.c.run_id,
        "source": VERSIONS.c.source,
        "source_path": VERSIONS.c.source,
        "state": VERSIONS.c.state,
        "framework": VERSIONS.c.framework,
        "checksum": VERSIONS.c.checksum,
        "registered_by": VERSIONS.c.registered_by,
        "version_number": VERSIONS.c.number,
        "size_bytes": VERSIONS.c.size_bytes,
        "creation_timestamp": VERSIONS.c.registered_us,
        "last_updated_timestamp": VERSIONS.c.updated_us,
    },
    tags=VERSION_TAGS,
    owner="version_key",
    default=(Ordering("key", descending=True),),
)

MODEL_SEARCH = Searchable(
    query=MODEL_QUERY,
    key=MODELS.c.key,
    fields={
        "name": MODELS.c.model_id,
        "model_id": MODELS.c.model_id,
        "creation_timestamp": MODELS.c.created_us,
        "last_updated_timestamp": MODELS.c.updated_us,
        "timestamp": MODELS.c.updated_us,
    },
    tags=MODEL_TAGS,
    owner="model_key",
    default=(Ordering("name", descending=False),),
)

_MILLISECONDS = {"creation_timestamp", "last_updated_timestamp", "timestamp"}


def find_page(
    connection: sa.Connection,
    kind: Searchable,
    *,
    filter_text: str = "",
    order_by: Sequence[str] = (),
    limit: int = 100,
    token: str | None = None,
    conditions: Iterable[sa.ColumnElement[bool]] = (),
) -> tuple[Sequence[Row], str | None]:
    """One page of rows and the token of the next. `conditions` hold besides the filter."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_PAGE:
        raise InvalidInputError(f"a page must hold between 1 and {MAX_PAGE} results, not {limit}")
    check_text("filter", filter_text)
    order = _order(kind, parse_ordering(tuple(order_by)))
    query = kind.query
    for comparison in parse_filter(filter_text):
        if comparison.tag is not None and comparison.operator == "=":
            query, owner = _join_tag(query, kind, comparison)
            # Equal to the key, and in the order of the index that finds the tag: nothing is sorted.
            order = [(owner if column is kind.key else column, down) for column, down in order]
        else:
            query = _apply(connection, query, kind, comparison)
    query = query.where(*conditions)
    identity = _identity(filter_text, order_by)
    if token:
        query = query.where(_after(order, _read_token(token, identity, order)))
    sorted_query = query.order_by(*(c.desc() if down else c.asc() for c, down in order))
    rows = list(connection.execute(sorted_query.limit(limit + 1)).mappings())
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], _make_token(identity, [_value(last, column, kind) for column, _ in order])


Direction = tuple[sa.Column[Any], bool]


def _order(kind: Searchable, orderings: tuple[Ordering, ...]) -> list[Direction]:
    chosen: list[Direction] = []
    for ordering in orderings or kind.default:
        column = kind.key if ordering.field == "key" else _field(kind, ordering.field)
        chosen.append((column, ordering.descending))
    if all(column is not kind.key for column, _ in chosen):
        chosen.append((kind.key, chosen[0][1]))
    return chosen


def _field(kind: Searchable, name: str) -> sa.Column[Any]:
    column = kind.fields.get(name)
    if column is None:
        raise InvalidInputError(
            f"{name[:60]!r} cannot be searched; these can: {', '.join(sorted(kind.fields))}, tags.KEY"
        )
    return column


def _apply(
    connection: sa.Connection, query: sa.Select[Any], kind: Searchable, comparison: Comparison
) -> sa.Select[Any]:
    if comparison.tag is not None:
        return _apply_tag(connection, query, kind, comparison)
    column = _field(kind, comparison.field)
    value = _typed(column, comparison)
    return query.where(_compare(connection, column, comparison.operator, value))


def _typed(column: sa.Column[Any], comparison: Comparison) -> Literal:
    value = comparison.value
    if isinstance(column.type, sa.Text):
        if isinstance(value, int):
            raise InvalidInputError(f"{comparison.field} is a text; put {value} in quotes")
        return value
    if comparison.operator in ("LIKE", "ILIKE", "IN"):
        raise InvalidInputError(
            f"{comparison.field} is a number; {comparison.operator} is for texts"
        )
    number = _whole(comparison.field, value)
    return number * 1000 if comparison.field in _MILLISECONDS else number


def _whole(field: str, value: Literal) -> int:
    try:
        number = int(value)  # type: ignore[arg-type]  # a tuple is refused like any other non-number
    except (TypeError, ValueError):
        raise InvalidInputError(f"{field} is a number, {str(value)[:40]!r} is not") from None
    if abs(number) > 2**53:
        raise InvalidInputError(f"{field}: {number} is out of range")
    return number


def _join_tag(
    query: sa.Select[Any], kind: Searchable, comparison: Comparison
) -> tuple[sa.Select[Any], sa.Column[Any]]:
    """The query for things with exactly this tag, and the tag's own copy of their key."""
    tags, value = kind.tags.alias(), comparison.value
    if not isinstance(value, str):
        raise InvalidInputError(f"tags are texts; put {value} in quotes")
    owner: sa.Column[Any] = tags.c[kind.owner]
    same = sa.and_(owner == kind.key, tags.c.tag == comparison.tag, tags.c.value == value)
    return query.join(tags, sa.and_(same, tags.c.digest == tag_digest(value))), owner


def _value(row: Row, column: sa.Column[Any], kind: Searchable) -> Any:
    return row[kind.key.name if column.name == kind.owner else column.name]


def _apply_tag(
    connection: sa.Connection, query: sa.Select[Any], kind: Searchable, comparison: Comparison
) -> sa.Select[Any]:
    tags = kind.tags.alias()
    value = comparison.value
    if isinstance(value, int):
        raise InvalidInputError(f"tags are texts; put {value} in quotes")
    mine = sa.and_(tags.c[kind.owner] == kind.key, tags.c.tag == comparison.tag)
    if comparison.operator == "!=":
        same = sa.and_(mine, tags.c.value == value)
        return query.where(~sa.exists(sa.select(1).select_from(tags).where(same)))
    condition = _compare(connection, tags.c.value, comparison.operator, value)
    return query.where(sa.exists(sa.select(1).select_from(tags).where(mine, condition)))


_SIMPLE: dict[str, Callable[[sa.ColumnElement[Any], Any], sa.ColumnElement[bool]]] = {
    "=": lambda column, value: column == value,
    "!=": lambda column, value: column != value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
    "IN": lambda column, value: column.in_(value),
    "ILIKE": lambda column, value: column.ilike(value),
}


def _compare(
    connection: sa.Connection, column: sa.ColumnElement[Any], operator: str, value: Literal
) -> sa.ColumnElement[bool]:
    if operator != "LIKE":
        return _SIMPLE[operator](column, value)
    if connection.dialect.name == "sqlite":
        # SQLite's LIKE ignores case, its GLOB does not.
        return column.op("GLOB", is_comparison=True)(_glob(str(value)))
    return column.like(value)


def _glob(pattern: str) -> str:
    special = {"%": "*", "_": "?", "*": "[*]", "?": "[?]", "[": "[[]"}
    return "".join(special.get(character, character) for character in pattern)


def _after(order: list[Direction], values: list[Any]) -> sa.ColumnElement[bool]:
    """The condition that a row comes after the one with these values."""
    if len({down for _, down in order}) == 1:
        columns = sa.tuple_(*(column for column, _ in order))
        place = sa.tuple_(*(sa.literal(v, c.type) for v, (c, _) in zip(values, order, strict=True)))
        return columns < place if order[0][1] else columns > place
    options: list[sa.ColumnElement[bool]] = []
    equal: list[sa.ColumnElement[bool]] = []
    for (column, down), value in zip(order, values, strict=True):
        options.append(sa.and_(*equal, column < value if down else column > value))
        equal.append(column == value)
    return sa.or_(*options)


def _identity(filter_text: str, order_by: Sequence[str]) -> str:
    text = json.dumps([filter_text, list(order_by)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _make_token(identity: str, values: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps([identity, values]).encode()).decode("ascii")


def _read_token(token: str, identity: str, order: list[Direction]) -> list[Any]:
    try:
        found, values = json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, TypeError, RecursionError):
        raise InvalidInputError("the page token was not made by this registry") from None
    if found != identity:
        raise InvalidInputError("the page token belongs to another search")
    kinds = [str if isinstance(column.type, sa.Text) else int for column, _ in order]
    if not isinstance(values, list) or [type(value) for value in values] != kinds:
        raise InvalidInputError("the page token was not made by this registry")
    if any(isinstance(value, int) and abs(value) > 2**63 - 1 for value in values):
        raise InvalidInputError("the page token was not made by this registry")
    return [check_text("page token", v) if isinstance(v, str) else v for v in values]
