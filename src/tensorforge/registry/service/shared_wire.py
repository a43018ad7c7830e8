"""What goes over the wire, as typed structures: what all requests and answers have in common."""

from __future__ import annotations

from typing import Annotated, Any

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


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body or the query parameters of a request: what is not listed is refused."""


class Answer(msgspec.Struct, kw_only=True):
    """The body of an answer."""


class Nothing(Request):
    """No query parameters."""


class ChangeTags(Request):
    """Tags to set and keys to remove."""

    put: Tags = {}
    drop: Annotated[list[TagKey], Meta(max_length=MAX_TAGS)] = []


class SearchQuery(Request):
    """A filter, an order and a page."""

    filter: Annotated[str, Meta(max_length=5_000)] = ""
    order_by: Annotated[str, Meta(max_length=500)] = ""
    page_size: PageSize = 100
    page_token: PageToken | None = None

    def options(self) -> dict[str, Any]:
        """The page and order as the registry takes them."""
        clauses = [clause.strip() for clause in self.order_by.split(",")] if self.order_by else []
        return {"order_by": clauses, "limit": self.page_size, "token": self.page_token}


class LimitQuery(Request):
    """How many."""

    page_size: PageSize = 100


class HealthAnswer(Answer):
    """Whether the service works."""

    status: str


class ErrorAnswer(Answer):
    """What went wrong: the kind of error, and a message that says what to do."""

    error: str
    message: str
