"""One sentence about a failure of Spark, which itself has pages to say."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["sentence_of"]

_LENGTH_MAX: Final = 500
#: What was raised in Python: `package.Kind`.
_KIND: Final = re.compile(r"[A-Za-z_][\w.]*")
_RAISED_IN_SQL: Final = re.compile(r"\[USER_RAISED_EXCEPTION\] (.*?)(?: SQLSTATE: .*)?$", re.MULTILINE)
_CLASSIFIED: Final = re.compile(r"\[([A-Z][A-Z0-9_.]+)\] (.*?)(?: SQLSTATE: .*)?$", re.MULTILINE)
#: They only say that something else is wrong.
_WRAPPERS: Final = (
    "STREAM_FAILED",
    "FAILED_EXECUTE",
    "FOREACH_BATCH_USER_FUNCTION_ERROR",
    "PYTHON_DATA_SOURCE_ERROR",
    "PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR",
)
_TRACEBACK: Final = "Traceback (most recent call last):"


def sentence_of(problem: BaseException | str) -> str:
    """What went wrong, as whoever raised it first would say it."""
    text = str(problem)
    for find in (_raised_in_python, _raised_in_sql, _classified):
        found = find(text)
        if found:
            return _cut(found)
    plain = next((line for line in text.splitlines() if line.strip()), "")
    return _cut(plain or type(problem).__name__)


def _raised_in_python(text: str) -> str:
    """The end of the last traceback: the first line that is not indented.  What follows is Java's."""
    _, found, after = text.rpartition(_TRACEBACK)
    if not found:
        return ""
    line = next((line for line in after.splitlines() if line.strip() and not line[0].isspace()), "")
    kind, _, said = line.partition(":")
    if not _KIND.fullmatch(kind):
        return ""
    said = said.strip()
    inner = _raised_in_sql(said) or _classified(said)
    ours = kind.startswith("millstream.") and said
    return inner or (said if ours else f"{kind.rpartition('.')[2]}: {said}" if said else kind.rpartition(".")[2])


def _raised_in_sql(text: str) -> str:
    found = _RAISED_IN_SQL.findall(text)
    return str(found[-1]) if found else ""


def _classified(text: str) -> str:
    found = [(name, said) for name, said in _CLASSIFIED.findall(text) if name.split(".")[0] not in _WRAPPERS]
    return str(found[-1][1]) if found else ""


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LENGTH_MAX else f"{line[:_LENGTH_MAX]}..."
