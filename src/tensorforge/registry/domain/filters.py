"""The parser of the filter language for searches.

    name = 'ranker' AND tags.team = 'search' AND version_number >= 3 AND state IN ('canary', 'production')

A comparison has a field or a tag, an operator and a literal; comparisons are joined by AND. The key of a tag
may be quoted by backticks or double quotes. Every filter that MLflow clients send can be parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tensorforge.errors import InvalidInputError

MAX_FILTER = 5_000
_MAX_COMPARISONS = 20
_MAX_ORDERINGS = 10
_MAX_LITERALS = 500

Literal = str | int | tuple[str, ...]

_TOKENS = re.compile(
    r"""\s*(?:
      (?P<string>'(?:[^']|'')*')
    | (?P<quoted>`[^`]*`|"[^"]*")
    | (?P<number>-?\d+(?![\w.]))
    | (?P<word>[^\W\d][\w\-/:]*)
    | (?P<mark><=|>=|!=|=|<|>|\(|\)|,|\.)
    )""",
    re.VERBOSE,
)
_OPERATORS = frozenset({"=", "!=", "<", "<=", ">", ">=", "LIKE", "ILIKE", "IN"})
_TAG_WORDS = frozenset({"tag", "tags"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One condition. `tag` is the key of a tag, or `None` if `field` names a field."""

    field: str
    tag: str | None
    operator: str
    value: Literal


@dataclass(frozen=True, slots=True)
class Ordering:
    """A field to sort by."""

    field: str
    descending: bool


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def parse_filter(text: str) -> tuple[Comparison, ...]:
    """The comparisons in a filter; `InvalidInputError` shows the place that cannot be parsed."""
    if len(text) > MAX_FILTER:
        raise InvalidInputError(f"the filter has {len(text)} characters, at most {MAX_FILTER}")
    tokens = _tokenize(text)
    if not tokens:
        return ()
    reader = _Reader(tokens)
    comparisons = [_comparison(reader)]
    while not reader.at_end:
        reader.expect_word("AND")
        comparisons.append(_comparison(reader))
    if len(comparisons) > _MAX_COMPARISONS:
        raise InvalidInputError(f"a filter may have at most {_MAX_COMPARISONS} comparisons")
    return tuple(comparisons)


def parse_ordering(clauses: tuple[str, ...]) -> tuple[Ordering, ...]:
    """The orderings in clauses like `name ASC`; `InvalidInputError` shows a clause that cannot be parsed."""
    if len(clauses) > _MAX_ORDERINGS:
        raise InvalidInputError(f"{len(clauses)} fields to sort by are more than {_MAX_ORDERINGS}")
    found = []
    for clause in clauses:
        words = clause.replace(",", " ").split()
        if not 1 <= len(words) <= 2 or (
            len(words) == 2 and words[1].upper() not in ("ASC", "DESC")
        ):
            raise InvalidInputError(f"{clause[:60]!r} is no ordering; write: name ASC")
        found.append(Ordering(words[0].strip('`"'), len(words) == 2 and words[1].upper() == "DESC"))
    return tuple(found)


def _tokenize(text: str) -> list[_Token]:
    tokens, place, text = [], 0, text.rstrip()
    while place < len(text):
        match = _TOKENS.match(text, place)
        if match is None or match.lastgroup is None:
            raise InvalidInputError(
                f"the filter cannot be read from {text[place : place + 40]!r} on"
            )
        tokens.append(_Token(match.lastgroup, match[match.lastgroup]))
        place = match.end()
    return tokens


class _Reader:
    """Reads tokens in order; where another token was expected, `InvalidInputError` says which."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def at_end(self) -> bool:
        return self._place == len(self._tokens)

    def peek(self) -> _Token:
        return _Token("end", "the end") if self.at_end else self._tokens[self._place]

    def take(self, expected: str, accept: Callable[[_Token], bool]) -> _Token:
        token = self.peek()
        if not accept(token):
            raise InvalidInputError(
                f"the filter has {token.text[:40]!r} where {expected} should be"
            )
        self._place += 1
        return token

    def expect_word(self, word: str) -> None:
        self.take(word, lambda token: token.kind == "word" and token.text.upper() == word)

    def skip_mark(self, mark: str) -> bool:
        if self.peek() == _Token("mark", mark):
            self._place += 1
            return True
        return False


def _comparison(reader: _Reader) -> Comparison:
    field, tag = _identifier(reader)
    operator = reader.take(
        "an operator", lambda token: token.text.upper() in _OPERATORS
    ).text.upper()
    if operator == "IN":
        return Comparison(field, tag, operator, _list(reader))
    return Comparison(field, tag, operator, _literal(reader))


def _identifier(reader: _Reader) -> tuple[str, str | None]:
    first = reader.take("a field", lambda token: token.kind in ("word", "quoted"))
    name = _unquote(first)
    if first.kind == "word" and name.lower() in _TAG_WORDS and reader.skip_mark("."):
        parts = [_unquote(reader.take("a tag's key", _is_name))]
        while reader.skip_mark("."):
            parts.append(_unquote(reader.take("a tag's key", _is_name)))
        return "tag", ".".join(parts)
    return name.lower(), None


def _is_name(token: _Token) -> bool:
    return token.kind in ("word", "quoted", "number")


def _unquote(token: _Token) -> str:
    return token.text[1:-1] if token.kind == "quoted" else token.text


def _literal(reader: _Reader) -> str | int:
    token = reader.take(
        "a text in quotes or a number", lambda token: token.kind in ("string", "number", "quoted")
    )
    if token.kind == "number":
        return int(token.text)
    return token.text[1:-1].replace("''", "'") if token.kind == "string" else token.text[1:-1]


def _list(reader: _Reader) -> tuple[str, ...]:
    reader.take("(", lambda token: token == _Token("mark", "("))
    values = [str(_literal(reader))]
    while reader.skip_mark(","):
        values.append(str(_literal(reader)))
    reader.take(")", lambda token: token == _Token("mark", ")"))
    if len(values) > _MAX_LITERALS:
        raise InvalidInputError(f"a list in a filter may have at most {_MAX_LITERALS} values")
    return tuple(values)
