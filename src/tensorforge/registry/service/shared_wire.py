"""The structures that all requests and answers of the REST API share, and their field types."""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from tensorforge.registry.domain.names import (
    MAX_NAME,
    MAX_TAG_KEY,
    MAX_TAG_VALUE,
    MAX_TAGS,
    MAX_TEXT,
)

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Version = Annotated[str, Meta(pattern=r"^[0-9]{1,10}\.[0-9]{1,10}\.[0-9]{1,10}$", max_length=32)]
Whole = Annotated[int, Meta(ge=0, le=2**53)]
TagKey = Annotated[str, Meta(min_length=1, max_length=MAX_TAG_KEY)]
Tags = Annotated[
    dict[TagKey, Annotated[str, Meta(max_length=MAX_TAG_VALUE)]], Meta(max_length=MAX_TAGS)
]
Shape = Annotated[list[Whole], Meta(max_length=64)]
PageSize = Annotated[int, Meta(ge=1, le=10_000)]
PageToken = Annotated[str, Meta(max_length=2_000)]


class WireRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body or the query parameters of a request; fields that are not listed are refused."""


class Answer(msgspec.Struct, kw_only=True):
    """The body of an answer."""

    @classmethod
    def of(cls, value: object, **given: Any) -> Self:
        """An answer whose fields are `given` or else attributes of `value` with the same names."""
        names = [name for name in cls.__struct_fields__ if name not in given]
        return cls(**{name: getattr(value, name) for name in names}, **given)


class Nothing(WireRequest):
    """No query parameters."""


class ChangeTags(WireRequest):
    """Tags to set and keys to remove."""

    put: Tags = {}
    drop: Annotated[list[TagKey], Meta(max_length=MAX_TAGS)] = []


class SearchQuery(WireRequest):
    """A filter, an order, and which page."""

    filter: Annotated[str, Meta(max_length=5_000)] = ""
    order_by: Annotated[str, Meta(max_length=500)] = ""
    page_size: PageSize = 100
    page_token: PageToken | None = None

    def options(self) -> dict[str, Any]:
        """The order and the page as arguments of the registry's search methods."""
        clauses = [clause.strip() for clause in self.order_by.split(",")] if self.order_by else []
        return {"order_by": clauses, "limit": self.page_size, "token": self.page_token}


class LimitQuery(WireRequest):
    """How many items to list."""

    page_size: PageSize = 100


class HealthAnswer(Answer):
    """The answer of a service whose database answers."""

    status: str


class ErrorAnswer(Answer):
    """The kind of an error, and a message that says what was wrong and what to do."""

    error: str
    message: str
