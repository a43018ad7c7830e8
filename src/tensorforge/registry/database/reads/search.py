"""Searches by filter, page by page.

The token of a page has the sort values of the page's last row, and the next page begins after that row. So
every page costs the same, and rows that are added or removed between two pages neither repeat nor hide other
rows. Every value that a caller gives reaches the database as a bound parameter.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.sql import operators

from tensorforge.errors import InvalidInputError
from tensorforge.registry.database.dialects import Joined, JsonString, constant
from tensorforge.registry.database.rows import MODEL_QUERY, VERSION_ORDER, VERSION_QUERY
from tensorforge.registry.database.tables import MODEL_TAGS, MODELS, VERSION_TAGS, VERSIONS
from tensorforge.registry.domain.filters import (
    Comparison,
    Literal,
    Ordering,
    parse_filter,
    parse_ordering,
)
from tensorforge.registry.domain.names import PROMPT_TAG, check_text, tag_digest
from tensorforge.storage.database import Database
from tensorforge.storage.prepared import Prepared, Row
from tensorforge.validation import is_whole_number

MAX_PAGE = 10_000


def check_page_size(limit: int) -> int:
    """The page size; `InvalidInputError` unless it is a whole number from 1 to 10,000."""
    if not is_whole_number(limit) or not 1 <= limit <= MAX_PAGE:
        raise InvalidInputError(f"a page must have between 1 and {MAX_PAGE} results, not {limit}")
    return limit


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of results, and the token of the next page (`None` after the last)."""

    items: tuple[Item, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class Searchable:
    """What can be searched: the query, its key, the fields to filter and sort by, and the table of its tags.

    `owner` is the column of `tags` that has the key; `default` is the order if the caller names none.
    """

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


@dataclass(frozen=True, slots=True)
class Bounds:
    """What restricts a search besides its filter.

    That is one model, a range of versions, `low` <= v < `high`, and whether MLflow's prompts are searched
    (`True`) or everything else (`False`).
    """

    model_key: int | None = None
    prompts: bool | None = None
    low: tuple[int, int, int] | None = None
    high: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """An SQL expression by which the database writes a row as one JSON text without line breaks."""

    text: sa.ColumnElement[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """One page of a search, as the caller asks for it."""

    filter_text: str = ""
    order_by: Sequence[str] = ()
    limit: int = 100
    token: str | None = None
    bounds: Bounds = Bounds()


def find_page(
    connection: sa.Connection, kind: Searchable, search: PageRequest
) -> tuple[Sequence[Row], str | None]:
    """The rows of one page, and the token of the next."""
    plan = _plan(connection.dialect.name, kind, search)
    rows = plan.statement.all(connection, plan.values)
    if len(rows) <= search.limit:
        return rows, None
    last = rows[search.limit - 1]
    values = [last[column.name] for column, _ in plan.order]
    return rows[: search.limit], _make_token(plan.identity, values)


def find_documents(
    database: Database, kind: Searchable, document: Document, search: PageRequest
) -> tuple[str, str | None]:
    """One page as the items of a JSON array, written by the database, and the token of the next page.

    The rows never become Python objects. Converting them would take most of the time of a page, and SQLite's
    driver would release the interpreter lock at every row.
    """
    plan = _plan(database.dialect, kind, search, document)
    (page,) = database.fetch(plan.statement, plan.values)
    if page["rows"] <= search.limit:
        return page["documents"] or "", None
    documents, _, _ = page["documents"].rpartition(_BETWEEN_DOCUMENTS)
    place = page["places"].split(_BETWEEN_PLACES)[search.limit - 1]
    return documents, _make_token(plan.identity, json.loads(f"[{place}]"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A checked search: its statement and parameters, and what the token of the next page needs."""

    statement: Prepared
    values: dict[str, Any]
    order: list[Direction]
    identity: str


def _plan(
    dialect: str, kind: Searchable, search: PageRequest, document: Document | None = None
) -> _Plan:
    check_text("filter", search.filter_text)
    comparisons = parse_filter(search.filter_text)
    if search.bounds.prompts is not None:
        search, comparisons = _without_prompt_filter(search, comparisons)
    orderings = parse_ordering(tuple(search.order_by))
    order, identity = _order(kind, orderings), _identity(search.filter_text, search.order_by)
    values: dict[str, Any] = {"limit": check_page_size(search.limit) + 1}
    for number, comparison in enumerate(comparisons):
        values |= _values(dialect, kind, number, comparison)
    values |= _bound_values(search.bounds)
    if search.token:
        read = _read_token(search.token, identity, order)
        values |= {f"after{n}": value for n, value in enumerate(read)}
    shape = _StatementShape(
        dialect=dialect,
        comparisons=tuple(replace(each, value=_arity(each)) for each in comparisons),
        orderings=orderings,
        follows=bool(search.token),
        bounds=tuple(name for name in _BOUNDS if getattr(search.bounds, name) is not None),
        prompts=search.bounds.prompts,
        document=document,
    )
    statement = _prepare(kind.tags.name, shape)
    return _Plan(statement=statement, values=values, order=order, identity=identity)


_BOUNDS = ("model_key", "low", "high")


def _without_prompt_filter(
    search: PageRequest, comparisons: tuple[Comparison, ...]
) -> tuple[PageRequest, tuple[Comparison, ...]]:
    """The search with its comparisons of the prompt tag replaced by a bound.

    Without such a comparison, prompts are left out.
    """
    wanted = any(
        each.operator == "=" and str(each.value).lower() == "true"
        for each in comparisons
        if each.tag == PROMPT_TAG
    )
    rest = tuple(each for each in comparisons if each.tag != PROMPT_TAG)
    return replace(search, bounds=replace(search.bounds, prompts=wanted)), rest


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatementShape:
    """A search without its values: searches of the same shape share one compiled statement.

    Each comparison has the number of its values in place of the values. `follows` says that the page follows
    another one.
    """

    dialect: str
    comparisons: tuple[Comparison, ...]
    orderings: tuple[Ordering, ...]
    follows: bool
    bounds: tuple[str, ...]
    prompts: bool | None
    document: Document | None


def _arity(comparison: Comparison) -> int:
    return len(comparison.value) if isinstance(comparison.value, tuple) else 1


@functools.lru_cache(maxsize=500)
def _prepare(tags: str, shape: _StatementShape) -> Prepared:
    kind = VERSION_SEARCH if tags == VERSION_TAGS.name else MODEL_SEARCH
    order, query = _order(kind, shape.orderings), kind.query
    for number, comparison in enumerate(shape.comparisons):
        if comparison.tag is not None and comparison.operator == "=":
            query, owner = _join_tag(query, kind, number)
            # The index that finds the tag is sorted by the tag's copy of the key, so nothing must be sorted.
            order = [(owner if column is kind.key else column, down) for column, down in order]
        else:
            query = query.where(_condition(shape.dialect, kind, number, comparison))
    query = query.where(*(_bound(name) for name in shape.bounds))
    if shape.prompts is not None:
        is_prompt = _is_prompt(kind)
        query = query.where(is_prompt if shape.prompts else ~is_prompt)
    if shape.follows:
        query = query.where(_after(order))
    if shape.document is not None:
        shown: list[Any] = [shape.document.text.label("document"), _place(order).label("place")]
        query = query.with_only_columns(*shown, maintain_column_froms=True)
    sorted_query = query.order_by(*(c.desc() if down else c.asc() for c, down in order))
    page = sorted_query.limit(sa.bindparam("limit", type_=sa.Integer))
    return Prepared(page if shape.document is None else _in_one_row(page))


# JSON without line breaks contains neither.
_BETWEEN_DOCUMENTS, _BETWEEN_PLACES = ",\n", "\n"


def _place(order: list[Direction]) -> sa.ColumnElement[str]:
    """The sort values of a row, for a token: the items of a JSON array."""
    columns = [
        JsonString(c) if isinstance(c.type, sa.Text) else sa.cast(c, sa.Text) for c, _ in order
    ]
    return functools.reduce(lambda left, right: left + constant(",") + right, columns)


def _in_one_row(page: sa.Select[Any]) -> sa.Select[Any]:
    found = page.subquery()
    joined: list[Any] = [
        sa.func.count().label("rows"),
        Joined(found.c.document, constant(_BETWEEN_DOCUMENTS)).label("documents"),
        Joined(found.c.place, constant(_BETWEEN_PLACES)).label("places"),
    ]
    return sa.select(*joined).select_from(found)


def _is_prompt(kind: Searchable) -> sa.ColumnElement[bool]:
    tags = kind.tags.alias()
    mine = tags.c[kind.owner] == kind.key
    marked = sa.and_(
        tags.c.tag == constant(PROMPT_TAG), sa.func.lower(tags.c.value) == constant("true")
    )
    return sa.exists(sa.select(1).select_from(tags).where(mine, marked))


def _bound(name: str) -> sa.ColumnElement[bool]:
    if name == "model_key":
        return VERSIONS.c.model_key == sa.bindparam("model_key")
    parts = sa.tuple_(*(sa.bindparam(f"{name}{n}", type_=sa.BigInteger) for n in range(3)))
    return parts <= VERSION_ORDER if name == "low" else parts > VERSION_ORDER


def _bound_values(bounds: Bounds) -> dict[str, Any]:
    values: dict[str, Any] = {} if bounds.model_key is None else {"model_key": bounds.model_key}
    for name, bound in (("low", bounds.low), ("high", bounds.high)):
        values |= {f"{name}{n}": part for n, part in enumerate(bound or ())}
    return values


Direction = tuple[sa.Column[Any], bool]


def _order(kind: Searchable, orderings: tuple[Ordering, ...]) -> list[Direction]:
    chosen: list[Direction] = []
    for ordering in orderings or kind.default:
        column = kind.key if ordering.field == "key" else _field(kind, ordering.field)
        chosen.append((column, ordering.descending))
    if len({column.name for column, _ in chosen}) != len(chosen):
        raise InvalidInputError("order_by contains duplicate fields")
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


def _values(dialect: str, kind: Searchable, number: int, comparison: Comparison) -> dict[str, Any]:
    """The parameters of one comparison; `InvalidInputError` if its value does not fit its field."""
    value = comparison.value
    if comparison.tag is None:
        value = _typed(_field(kind, comparison.field), comparison)
    elif isinstance(value, int):
        raise InvalidInputError(f"tags are texts; put {value} in quotes")
    if comparison.operator == "LIKE" and dialect == "sqlite":
        value = _glob(str(value))
    found: dict[str, Any] = {f"tag{number}": comparison.tag} if comparison.tag is not None else {}
    if isinstance(value, tuple):
        return found | {f"value{number}_{n}": each for n, each in enumerate(value)}
    if comparison.tag is not None and comparison.operator == "=":
        found[f"digest{number}"] = tag_digest(str(value))
    return found | {f"value{number}": value}


def _join_tag(
    query: sa.Select[Any], kind: Searchable, number: int
) -> tuple[sa.Select[Any], sa.Column[Any]]:
    """The query restricted to rows with exactly this tag, and the column of the tag's copy of the key."""
    tags = kind.tags.alias()
    owner: sa.Column[Any] = tags.c[kind.owner]
    same = sa.and_(
        owner == kind.key,
        tags.c.tag == sa.bindparam(f"tag{number}"),
        tags.c.value == sa.bindparam(f"value{number}"),
        tags.c.digest == sa.bindparam(f"digest{number}"),
    )
    return query.join(tags, same), owner


def _condition(
    dialect: str, kind: Searchable, number: int, comparison: Comparison
) -> sa.ColumnElement[bool]:
    if comparison.tag is None:
        return _compare(dialect, _field(kind, comparison.field), number, comparison)
    tags = kind.tags.alias()
    mine = sa.and_(tags.c[kind.owner] == kind.key, tags.c.tag == sa.bindparam(f"tag{number}"))
    fits = _compare(dialect, tags.c.value, number, comparison)
    return sa.exists(sa.select(1).select_from(tags).where(mine, fits))


_COMPARE: dict[str, Callable[[Any, Any], sa.ColumnElement[bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "ILIKE": operators.ilike_op,
}


def _compare(
    dialect: str, column: sa.ColumnElement[Any], number: int, comparison: Comparison
) -> sa.ColumnElement[bool]:
    if comparison.operator == "IN":
        count = cast("int", comparison.value)
        return column.in_(
            [sa.bindparam(f"value{number}_{n}", type_=column.type) for n in range(count)]
        )
    value = sa.bindparam(f"value{number}", type_=column.type)
    if comparison.operator != "LIKE":
        return _COMPARE[comparison.operator](column, value)
    if dialect == "sqlite":
        # SQLite's LIKE ignores case, its GLOB does not.
        return column.op("GLOB", is_comparison=True)(value)
    return column.like(value)


def _glob(pattern: str) -> str:
    special = {"%": "*", "_": "?", "*": "[*]", "?": "[?]", "[": "[[]"}
    return "".join(special.get(character, character) for character in pattern)


def _after(order: list[Direction]) -> sa.ColumnElement[bool]:
    """The condition that a row comes after the row whose sort values are bound."""
    places = [sa.bindparam(f"after{n}", type_=column.type) for n, (column, _) in enumerate(order)]
    if len({down for _, down in order}) == 1:
        columns = sa.tuple_(*(column for column, _ in order))
        return columns < sa.tuple_(*places) if order[0][1] else columns > sa.tuple_(*places)
    options: list[sa.ColumnElement[bool]] = []
    equal: list[sa.ColumnElement[bool]] = []
    for (column, down), value in zip(order, places, strict=True):
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
