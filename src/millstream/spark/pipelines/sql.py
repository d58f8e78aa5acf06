"""What can be known of a SQL text without a parser for it: which tables it reads, and whether it can be whole.

Spark has the parser, and says the rest; but it takes ten seconds to start, and a misspelt name should not.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["SqlBroken", "check_sql", "tables_of"]


class SqlBroken(ValueError):
    """The text ends in the middle of something."""


class _Token(NamedTuple):
    text: str
    #: A name in backticks is never a word of the language.
    quoted: bool = False

    @property
    def word(self) -> str:
        return "" if self.quoted else self.text.upper()

    @property
    def is_name(self) -> bool:
        return self.quoted or bool(re.fullmatch(r"[^\W\d]\w*", self.text))


_SKIPPED: Final = re.compile(r"\s+|--[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING: Final = re.compile(r"'(?:\\.|''|[^'\\])*'|\"(?:\\.|\"\"|[^\"\\])*\"", re.DOTALL)
_QUOTED: Final = re.compile(r"`((?:``|[^`])+)`")
_PLAIN: Final = re.compile(r"[^\W\d]\w*|\d[\w.]*|.", re.DOTALL)
_CLOSING: Final = {")": "(", "]": "[", "}": "{"}
#: Functions in which FROM stands for something else.
_WITH_FROM: Final = frozenset(("EXTRACT", "TRIM", "SUBSTRING", "SUBSTR", "OVERLAY", "POSITION"))
_QUERY_BEGINS: Final = frozenset(("SELECT", "WITH", "VALUES", "FROM", "TABLE", "("))
#: What may follow a table, so it is not its other name.
_AFTER_TABLE: Final = frozenset(
    (
        *("WHERE", "GROUP", "ORDER", "HAVING", "LIMIT", "OFFSET", "UNION", "EXCEPT", "MINUS", "INTERSECT", "WINDOW"),
        *("JOIN", "INNER", "LEFT", "RIGHT", "FULL", "CROSS", "SEMI", "ANTI", "NATURAL", "ON", "USING", "LATERAL"),
        *("CLUSTER", "DISTRIBUTE", "SORT", "TABLESAMPLE", "PIVOT", "UNPIVOT", "QUALIFY", "WATERMARK"),
    )
)


def check_sql(text: str) -> None:
    """Raises SqlBroken for quotes and brackets that are not closed."""
    _tokens(text)


def tables_of(text: str) -> list[str]:
    """The tables that a query reads, in the order of their first mention, without those it makes itself.

    Tables of a catalogue (`database.table`) and functions that make tables are left out: they are not ours.
    """
    tokens = _tokens(text)
    made = _made(tokens)
    found: dict[str, str] = {}
    for at in _places(tokens):
        name = tokens[at].text
        follows = tokens[at + 1].text if at + 1 < len(tokens) else ""
        is_made = any(name.lower() == each.name and each.first <= at < each.until for each in made)
        if follows not in (".", "(") and not is_made:
            found.setdefault(name.lower(), name)
    return list(found.values())


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    opened: list[str] = []
    at = 0
    while at < len(text):
        if skipped := _SKIPPED.match(text, at):
            at = skipped.end()
            continue
        if string := _STRING.match(text, at):
            tokens.append(_Token("''"))
            at = string.end()
            continue
        if quoted := _QUOTED.match(text, at):
            tokens.append(_Token(quoted[1].replace("``", "`"), quoted=True))
            at = quoted.end()
            continue
        plain = _PLAIN.match(text, at)
        assert plain is not None
        symbol = plain[0]
        if symbol in "'\"`" or text.startswith("/*", at):
            raise SqlBroken(f"there is no end to what begins with {text[at : at + 20]!r}")
        if symbol in "([{":
            opened.append(symbol)
        elif symbol in _CLOSING and (not opened or opened.pop() != _CLOSING[symbol]):
            raise SqlBroken(f"there is a {symbol!r} that closes nothing")
        tokens.append(_Token(symbol))
        at = plain.end()
    if opened:
        raise SqlBroken(f"a {opened[-1]!r} is never closed")
    return tokens


class _Made(NamedTuple):
    """A name that stands for a query, and the tokens among which it does."""

    name: str
    first: int
    until: int


def _made(tokens: list[_Token]) -> list[_Made]:
    """`WITH name AS (...)`, `, name (columns) AS (...)`: what is in these brackets still means a table of that name."""
    made: list[_Made] = []
    recursive = any(token.word == "RECURSIVE" for token in tokens)
    opened: list[int] = []
    for at, token in enumerate(tokens[:-2]):
        if token.text == "(" and not token.quoted:
            opened.append(at)
        elif token.text == ")" and not token.quoted:
            opened.pop()
        if not token.is_name or token.word == "AS":
            continue
        after = _closing(tokens, at + 1) + 1 if tokens[at + 1].text == "(" else at + 1
        if [each.word for each in tokens[after : after + 2]] == ["AS", "("]:
            first = after if recursive else _closing(tokens, after + 1)
            made.append(_Made(token.text.lower(), first, _closing(tokens, opened[-1]) if opened else len(tokens)))
    return made


def _closing(tokens: list[_Token], opening: int) -> int:
    depth = 0
    for at in range(opening, len(tokens)):
        depth += {"(": 1, ")": -1}.get(tokens[at].text, 0)
        if not depth:
            return at
    return len(tokens)


def _places(tokens: list[_Token]) -> list[int]:
    """Where a table is named."""
    places: list[int] = []
    callers: list[str] = []
    for at, token in enumerate(tokens):
        if token.text == "(" and not token.quoted:
            callers.append(tokens[at - 1].word if at else "")
        elif token.text == ")" and not token.quoted:
            callers.pop()
        elif token.word == "JOIN" or (token.word == "FROM" and _is_clause(tokens, at, callers)):
            places += _listed(tokens, at + 1)
    return places


def _is_clause(tokens: list[_Token], at: int, callers: list[str]) -> bool:
    before = tokens[at - 1].word if at else ""
    two_before = tokens[at - 2].word if at > 1 else ""
    if before == "DISTINCT" and two_before in ("IS", "NOT"):
        return False
    return not (callers and callers[-1] in _WITH_FROM)


def _listed(tokens: list[_Token], at: int) -> list[int]:
    """`a, b AS c, (SELECT ...), d`: the names in a list of tables."""
    places: list[int] = []
    while at < len(tokens):
        while tokens[at].word in ("STREAM", "LATERAL") and at + 1 < len(tokens):
            at += 1
        if tokens[at].text == "(" and not tokens[at].quoted:
            if at + 1 < len(tokens) and tokens[at + 1].word not in _QUERY_BEGINS:
                places += _listed(tokens, at + 1)  # `(a JOIN b)`
            at = _closing(tokens, at) + 1  # else a query of its own, which is found by its own FROM
        elif tokens[at].is_name:
            places.append(at)
            at += 1
            while at < len(tokens) and tokens[at].text in (".", "("):
                at = _closing(tokens, at) + 1 if tokens[at].text == "(" else at + 2
        else:
            return places
        if at < len(tokens) and tokens[at].word == "AS":
            at += 1
        if at < len(tokens) and tokens[at].is_name and tokens[at].word not in _AFTER_TABLE:
            at += 1
        if at >= len(tokens) or tokens[at].text != ",":
            return places
        at += 1
    return places
