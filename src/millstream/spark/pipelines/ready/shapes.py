"""Error texts by their shape: without what differs each time, a thousand texts are one mistake."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["NO_TEXT", "families", "shape", "shape_column"]

NO_TEXT: Final = "(no error text)"
_LENGTH_MAX: Final = 300
#: Python and Java read these alike.
_PATTERNS: Final = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "<email>"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "<address>"),
    (r"\b0[xX][0-9a-fA-F]+\b", "<hex>"),
    (r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b", "<hex>"),
    (r"\b(?=[A-Za-z0-9_]*\d)(?=[A-Za-z0-9_]*[A-Za-z])[A-Za-z0-9_]{16,}\b", "<id>"),
    # What a protocol says by a number is a text: 404 is not 503.
    (r"(?!^[1-5]\d\d )(?<!\d)(?<!HTTP )(?<!status )(?<!code )(?<!rrno )\d+(?:[.,:]\d+)*", "<n>"),
    (r"\s+", " "),
)
_COMPILED: Final = [(re.compile(pattern, re.ASCII), instead) for pattern, instead in _PATTERNS]
#: So many texts that differ in one word only, and that word is a name of something.
_VARIANTS: Final = 6
_ANY: Final = "<…>"


def shape(text: str) -> str:
    """A text without times, ids, addresses and numbers."""
    for pattern, instead in _COMPILED:
        text = pattern.sub(instead, text)
    return text.strip()[:_LENGTH_MAX] or NO_TEXT


def shape_column(column: Column) -> Column:
    """As `shape`, for a column of texts."""
    from pyspark.sql import functions as F  # noqa: N812

    text = F.coalesce(column, F.lit(""))
    for pattern, instead in _PATTERNS:
        text = F.regexp_replace(text, pattern, instead)
    text = F.substring(F.trim(text), 1, _LENGTH_MAX)
    return F.when(text == "", F.lit(NO_TEXT)).otherwise(text)


def families(shapes: Iterable[str]) -> Mapping[str, str]:
    """Shape -> the shape of its family.

    `customer <n> has no address in Rome`, `... in Oslo` and so on are one mistake.  `table orders is missing` and
    `table users is missing` may be two, so it takes several texts with the same gap before a word counts as a name.
    """
    words = {each: each.split(" ") for each in dict.fromkeys(shapes)}
    gaps: defaultdict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    for each, parts in words.items():
        for at in range(len(parts)) if len(parts) > 2 else ():
            gaps[at, (*parts[:at], _ANY, *parts[at + 1 :])].append(each)
    found: dict[str, str] = {}
    for (_, masked), members in sorted(gaps.items(), key=lambda gap: (-len(gap[1]), gap[0])):
        if len(members) < _VARIANTS:
            break
        for member in members:
            found.setdefault(member, " ".join(masked))
    return {each: found.get(each, each) for each in words}
